"""Progress read from the growing files of rank 0 and the recorder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.results.figures import FigureName
from accelmark.results.read.reevaluation import reevaluation_dir
from accelmark.results.rounds.summary import write_round
from accelmark.results.schema import Figure, InferenceRound, RoundResult
from accelmark.run.agent.rank_exit import escaped_line
from accelmark.run.display.displays import (
    Board,
    LiveDisplay,
    PlainDisplay,
    _devices,
    draw,
    headline,
    job_line,
    job_name,
    plain_progress,
)
from accelmark.run.display.progress import JobProgress, ProgressReader
from accelmark.run.display.summary import print_status, read_status
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.job import InferJob, NodeExit, ServeJob, TrainJob
from accelmark.spec.log.perflog import decode_line, encode_line
from accelmark.spec.settings.training import EndSettings
from tests.made_run import Made, make_run
from tests.run.fakes import job_spec, make_plan


def line(event: str, **value: Any) -> str:
    return encode_line(event, value, {"time_ms": 0, "mono_ms": 0, "rank": 0}) + "\n"


def drawn(board: Board, width: int = 80) -> str:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(draw(board, width - 1))
    return capture.get()


def window(step: int, loss: float | None = 1.0) -> str:
    figures = {"learning_rate": 0.1, "losses": [loss], "step_ms": [], "data_wait_ms": [], "wall_ms": 100.0 * 10}
    return line("STEP_END", global_steps=step, epoch=0, num_trained_samples=8 * step, loss=loss, **figures)


def reader(node_dir: Path, **end: Any) -> ProgressReader:
    job = job_spec().work
    assert isinstance(job, TrainJob)
    settings = job.settings.model_copy(update={"end": EndSettings(**end)})
    return ProgressReader(node_dir, job.model_copy(update={"settings": settings}))


def test_progress_follows_a_log_that_grows_in_the_middle_of_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank0.out.log"
    follow = reader(tmp_path, max_steps=100)
    assert follow.read().phase == "starting"
    text = line("TRAIN_START") + window(10)
    log.write_text(text[:-20])
    assert (seen := follow.read()).step == 0
    assert seen.phase == "first steps"
    log.write_text(text + "a print in between\n" + window(20, None))
    seen = follow.read()
    assert (seen.phase, seen.step, seen.total_steps, seen.loss) == ("training", 20, 100, None)
    assert seen.throughput == pytest.approx(8 * 10 * 16 / 1.0)
    assert seen.eta_s == pytest.approx(8.0)
    assert seen.share == pytest.approx(0.2)


def test_the_total_of_steps_is_exact_from_the_first_window(tmp_path: Path) -> None:
    log = tmp_path / "rank0.out.log"
    log.write_text(line("TRAIN_START", total_steps=1872) + window(20))
    follow = reader(tmp_path, max_epochs=4)
    seen = follow.read()
    assert seen.total_steps == 1872
    assert seen.share == pytest.approx(20 / 1872)
    with log.open("a") as stream:
        stream.write(line("FINISHED"))
    seen = follow.read()
    assert (seen.phase, seen.share, seen.eta_s) == ("finished", None, None), "what has ended is not in part done"


def test_a_bound_on_time_gives_the_eta(tmp_path: Path) -> None:
    (tmp_path / "rank0.out.log").write_text(line("TRAIN_START") + window(10))
    seen = reader(tmp_path, max_steps=100000, max_duration_s=4.0).read()
    assert seen.eta_s == pytest.approx(3.0)
    assert seen.share == pytest.approx(0.25)


def test_the_passes_of_an_engine_have_a_share_and_an_eta(tmp_path: Path) -> None:
    calls = {"items": [8, 8], "latency_ms": [900, 900], "not_inference_ms": [0, 0], "nonfinite_batches": 0}
    windows = [
        line("FORWARD", phase="inference", pass_number=1, wall_ms=2000, planned_items=64, **calls) for _ in range(2)
    ]
    log = tmp_path / "rank0.out.log"
    log.write_text(line("STAGE_BEGIN", step="infer", number=6) + "".join(windows))
    follow = reader(tmp_path, max_steps=1)
    seen = follow.read()
    assert (seen.phase, seen.samples, seen.throughput) == ("inferring", 32, 8.0)
    assert (seen.share, seen.eta_s) == (0.5, 4.0)
    with log.open("a") as stream:
        stream.write(line("EVALUATE", phase="inference", num_items=32, metrics={"accuracy": 0.5}))
    seen = follow.read()
    assert (seen.samples, seen.share, seen.eta_s, seen.metric) == (
        0,
        None,
        None,
        ("accuracy (engine, all passes)", 0.5),
    )
    with log.open("a") as stream:
        stream.write(line("HEARTBEAT", phase="scenario server", num_requests=70, share=0.25, eta_s=30))
    seen = follow.read()
    assert (seen.phase, seen.samples, seen.share, seen.eta_s) == ("scenario server", 70, 0.25, 30)
    with log.open("a") as stream:
        stream.write(line("STAGE_BEGIN", step="summarise", number=7))
    seen = follow.read()
    assert (seen.samples, seen.share, seen.eta_s) == (0, None, None)


def test_a_live_metric_of_inference_names_its_inputs_until_engine_and_framework_are_over_the_same(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rank0.out.log"
    unset: Any = {"metric": "top1"}
    follow = ProgressReader(tmp_path, InferJob.model_construct(**unset))
    (job,) = make_plan(("toy",)).jobs
    statuses = {job.directory: JobStatus("running")}

    def shown(*events: str) -> tuple[str, str]:
        with log.open("a") as stream:
            stream.writelines(events)
        progress = follow.read()
        console = Console(width=100, force_terminal=True, color_system=None)
        with console.capture() as capture:
            console.print(draw(Board(make_plan(("toy",)), statuses, progress=progress), 100))
        return plain_progress(progress, job).partition("  ")[2], capture.get()

    passed = line("EVALUATE", phase="validation", num_items=9, metrics={"loss": 0.4, "top1": 0.9164})
    plain, drawn = shown(passed, line("STAGE_BEGIN", step="infer", number=6))
    assert plain == "top1 (framework, data as published) 0.9164"
    assert plain in drawn
    plain, drawn = shown(line("EVALUATE", phase="inference", num_items=99, metrics={"loss": 0.4, "top1": 0.9158}))
    assert plain == "top1 (engine, all passes) 0.9158"
    checked = {"num_items": 9, "median_error": 0.0, "worst_error": 0.0, "top1_agreement": 1.0}
    metrics = {"engine_metrics": {"loss": 0.4, "top1": 0.9165}, "framework_metrics": {"loss": 0.4, "top1": 0.9161}}
    plain, drawn = shown(line("ANSWER_CHECK", **checked, **metrics))
    assert plain == "top1 0.91650, framework 0.91610 on the same inputs"
    assert plain in drawn


def test_the_status_of_a_run_says_that_weights_are_evaluated(tmp_path: Path) -> None:
    plan = make_plan(("toy",))
    (job,) = plan.jobs
    directory = RunDirectory.create(tmp_path / "run", plan)
    log = directory.event_log()
    log.move(job.directory, "preparing")
    log.move(job.directory, "running")
    log.close()
    node = directory.node_dir(job, job.nodes[0])
    node.mkdir(parents=True)
    (node / "rank0.out.log").write_text(line("TRAIN_START") + window(10) + line("FINISHED"))

    def status() -> str:
        console = Console(file=io.StringIO(), width=120)
        print_status(read_status(directory.path), console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()[0]

    assert "running  its ranks have ended  step 10" in status()
    evaluating = reevaluation_dir(directory.round_dir(job)) / node.name
    evaluating.mkdir(parents=True)
    assert "running  evaluating weights  step 10" in status()
    ended = NodeExit(
        host="localhost", noderank=0, state="succeeded", reason=None, started_at="", duration_s=1.0, ranks=()
    )
    (evaluating / "exit.json").write_text(ended.model_dump_json())
    assert "running  its ranks have ended  step 10" in status()


def test_the_status_of_a_round_continues_indented_on_a_narrow_terminal(tmp_path: Path) -> None:
    plan = make_plan(("toy",))
    directory = RunDirectory.create(tmp_path / "run", plan)
    log = directory.event_log()
    log.move(plan.jobs[0].directory, "preparing")
    log.move(plan.jobs[0].directory, "failed", reason="localhost: rank 0 (node rank 0) was killed by signal 9")
    log.close()
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    print_status(read_status(directory.path), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue().partition("\n")[0]
    first, *others = [text[at : at + 40] for at in range(0, len(text), 40)]
    assert first.startswith("✗ toy0:pytorch")
    assert others
    assert all(row.startswith("    ") and not row[4].isspace() for row in others)


@pytest.mark.parametrize(("state", "option"), [("cancelled", ""), ("failed", " --failed"), ("succeeded", None)])
def test_status_and_stop_name_the_command_that_repeats_rounds(state: Any, option: str | None, tmp_path: Path) -> None:
    plan = make_plan(("toy",))
    directory = RunDirectory.create(tmp_path / "run", plan)
    log = directory.event_log()
    for each in ("preparing", "running", state):
        log.move(plan.jobs[0].directory, each)
    log.close()
    expected = "" if option is None else f"Continue with: accelmark resume {directory.path}{option}\n"
    console = Console(file=io.StringIO(), width=400)
    print_status(read_status(directory.path), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().partition("\n")[2] == expected
    stopped = CliRunner().invoke(app, ["stop", str(directory.path)], catch_exceptions=False)
    assert stopped.stdout == f"{directory.path}: not running\n{expected}"


def test_a_load_has_a_place_a_share_and_an_eta_in_both_displays() -> None:
    plan = make_plan(())
    job = plan.jobs[0]
    statuses = {job.directory: JobStatus("running")}
    progress = JobProgress("scenario server", samples=1234, share=0.25, eta_s=75)
    assert plain_progress(progress, job) == "scenario server  1,234 requests  25\u202f%  ETA 1 m 15 s"
    unset: Any = {}
    served = job.model_copy(update={"job": job.job.model_copy(update={"work": ServeJob.model_construct(**unset)})})
    assert plain_progress(JobProgress("finished", samples=40), served) == "its ranks have ended  40 requests"
    assert "1,234 requests  25\u202f%  ETA 1 m 15 s" in drawn(Board(plan, statuses, progress=progress))


def test_the_check_of_a_round_after_its_end_is_shown_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("accelmark.run.display.displays.time.monotonic", lambda: now[0])
    plan = make_plan(())
    job = plan.jobs[0]
    shown = LiveDisplay(plan, {job.directory: JobStatus("running")})
    shown.progress(job, JobProgress("finished", 350))
    assert "finished, 0 s" in drawn(shown._board)
    for now[0] in (300.0, 300.2, 312.0):
        shown.preparing(job, "evaluating weights, replaying steps")
    assert "evaluating weights, replaying steps, 12 s" in drawn(shown._board)
    shown.progress(job, JobProgress("training", 1))
    assert "training" in drawn(shown._board)
    shown.state(job, JobStatus("succeeded"))
    for now[0] in (400.0, 407.0):  # a resumed run checks its weights again
        shown.preparing(job, "evaluating weights, replaying steps")
    assert "evaluating weights, replaying steps, 7 s" in drawn(shown._board)
    fields: Any = {"converged": None, "figures": {}, "unit": "token", "target": None}
    shown.result(job, RoundResult.model_construct(**fields))
    assert "evaluating" not in drawn(shown._board)


def test_a_result_in_one_line_names_its_latencies() -> None:
    values = {FigureName.OUTPUT_RATE: 1090.0, FigureName.TTFT_P50: 81.85, FigureName.TPOT_P50: 12.49}
    figures = {name: Figure(value=value) for name, value in values.items()}
    fields: Any = {"converged": None, "figures": figures, "unit": "token", "target": None, "inference": None}
    result = RoundResult.model_construct(**fields)
    shown = "1,090\u202ftokens/s, TTFT, median 81.85\u202fms, TPOT, median 12.49\u202fms"
    assert headline(result) == shown


def test_devices_are_added_up_and_unknown_ones_stay_unknown(tmp_path: Path) -> None:
    devices = [{"utilisation": 0.5, "power_w": 100.0}, {"utilisation": 1.0, "power_w": None}]
    host = {"cpu": 0.25, "power_w": None, "mem_used_mib": 4096.0, "rank_rss_mib": 512.0}
    sample = {"t": 1.0, "host": host, "devices": devices}
    (tmp_path / "telemetry.jsonl").write_text(f'{{"header": {{}}}}\n{json.dumps(sample)}\n')
    seen = reader(tmp_path, max_steps=1).read().devices
    assert (seen.utilisation, seen.power_w, seen.memory_used_mib, seen.cpu) == (0.75, 100.0, None, 0.25)
    assert (seen.rank_memory_mib, seen.host_memory_used_mib) == (512.0, 4096.0)


@pytest.mark.parametrize(("are_cpus", "first"), [(True, ["cpu", "75"]), (False, ["device", "76"])])
def test_a_cpu_under_test_is_shown_as_the_host_only(are_cpus: bool, first: list[str], tmp_path: Path) -> None:
    sample = {"t": 1.0, "host": {"cpu": 0.75, "rank_rss_mib": 512.0}, "devices": [{"utilisation": 0.76}]}
    header = {"header": {"devices_are_cpus": are_cpus}}
    (tmp_path / "telemetry.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(sample)}\n")
    seen = reader(tmp_path, max_steps=1).read()
    assert _devices(seen).plain.split()[:2] == first
    (job,) = make_plan(("toy",)).jobs
    assert f"{first[0]} {first[1]}\u202f%" in plain_progress(seen, job)


@given(st.binary(max_size=400))
def test_noise_is_never_an_event_and_always_printable(noise: bytes) -> None:
    text = noise.decode("utf-8", errors="backslashreplace")
    assert not decode_line(text)
    assert all(c.isprintable() or c == "\t" for c in escaped_line(text))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_display_never_wraps(width: int) -> None:
    plan = make_plan(*((),) * 12, repeat=2)
    names = [job.directory for job in plan.jobs]
    statuses = {name: JobStatus() for name in names}
    statuses[names[0]] = JobStatus("failed", "a reason that is much longer than any terminal is wide " * 4)
    statuses[names[1]] = JobStatus("running")
    progress = JobProgress("training", 123456, 10**6, 3, 10**7, 0.1234, ("accuracy", 0.5), 1e6, 10.0, 1e5, 0.12)
    board = Board(plan, statuses, progress=progress, losses=[1 / n for n in range(1, 100)], notes=["x" * 300])
    lines = drawn(board, width).splitlines()
    assert all(len(shown) < width for shown in lines)  # what is typed behind a full line would begin a new one
    assert len(lines) <= 17


def test_notes_are_cut_off_while_the_run_goes_on_only(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr("accelmark.run.display.displays.Console", lambda **_: console)
    with LiveDisplay(make_plan(()), {job.directory: JobStatus() for job in make_plan(()).jobs}) as shown:
        for name in ("first", "second", "third"):
            shown.note(f"warning: {name}: {'words and more words ' * 8}(what to do about the {name})")
        assert "what to do" not in drawn(shown._board)
    assert " ".join(drawn(shown._board).split()).count("(what to do about the ") == 3


def test_a_long_result_is_shown_whole_beside_its_name() -> None:
    plan = make_plan(())
    (job,) = plan.jobs
    result = "31,244 images/s, top-1 accuracy 0.9167, framework 0.9167 on the same inputs, Latency, median 3.05 ms"
    board = Board(plan, {job.directory: JobStatus("succeeded")}, headlines={job.directory: result})
    assert " ".join(job_line(board, job, len(job_name(job)) + 45).plain.split()).endswith(result)


def test_a_result_beside_a_long_name_is_on_lines_of_its_own() -> None:
    plan = make_plan(())
    (job,) = plan.jobs
    result = "9,976 images/s, top-1 accuracy 0.9172"
    board = Board(plan, {job.directory: JobStatus("succeeded")}, headlines={job.directory: result})
    name = len(job_name(job))
    assert job_line(board, job, name + 60).plain.endswith(f"{job_name(job)}  {result}")
    assert job_line(board, job, name + 12).plain.split("\n")[1:] == ["    9,976 images/s, top-1", "    accuracy 0.9172"]


def test_without_a_terminal_unchanged_progress_is_repeated_every_minute_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = make_plan(("toy",)).jobs
    out = io.StringIO()
    now = [0.0]
    monkeypatch.setattr("accelmark.run.display.displays.time.monotonic", lambda: now[0])
    shown = PlainDisplay(Console(file=out, width=120))
    for now[0] in range(100, 230, 5):
        shown.progress(job, JobProgress(phase="evaluating" if now[0] < 160 else "finished"))
    said = [text.split()[-1] for text in out.getvalue().splitlines()]
    assert said == ["evaluating", "ended", "ended"]


def test_without_a_terminal_a_round_without_figures_has_no_line_of_results(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", Made()), io.StringIO()
    result = write_round(next(run.glob("*/round1")))
    (job,) = make_plan(("toy",)).jobs
    shown = PlainDisplay(Console(file=out, width=120))
    shown.result(job, result.model_copy(update={"figures": {}, "converged": None}))
    assert out.getvalue() == ""
    shown.result(job, result)
    assert out.getvalue()


def test_without_a_terminal_a_long_check_of_hosts_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr("accelmark.run.display.displays.time.monotonic", lambda: now[0])
    shown = PlainDisplay(Console(file=out, width=120))
    for now[0] in range(21):
        shown.checking(f"checking 2 hosts, {now[0]} s")
    shown.checking("")
    assert out.getvalue().splitlines() == ["  checking 2 hosts, 2 s", "  checking 2 hosts, 12 s"]


def test_a_framework_without_a_metric_is_not_zero_in_the_line_of_a_result() -> None:
    named: Any = {"metric": "top1", "metric_title": ""}
    inference = InferenceRound.model_construct(**named)
    fields: Any = {"converged": None, "unit": "image", "target": None, "inference": inference}
    for framework, shown in ((None, "top1 0.9165"), (0.9161, "top1 0.91650, framework 0.91610 on the same inputs")):
        other = Figure(value=framework, reason=None if framework else "not finite")
        figures = {FigureName.ENGINE_METRIC: Figure(value=0.9165), FigureName.FRAMEWORK_METRIC: other}
        figures[FigureName.INFERENCE_CORE] = Figure(value=35007.0)
        found = headline(RoundResult.model_construct(figures=figures, **fields))
        assert found == f"35,007\u202fimages/s, {shown}", "the rate comes first, since a narrow terminal cuts the line"
