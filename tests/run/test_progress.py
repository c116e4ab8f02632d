"""Progress read from growing files, and the summary of a run in the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.results.cluster import scaling_curves
from accelmark.results.schema import AdaptationCost, ReplacedHook, Summary
from accelmark.run.display.displays import Board, DeviceLoad, JobProgress, ProgressReader, draw, plain_progress
from accelmark.run.display.summary import print_status, print_summary, read_status, scaling_lines
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.job import InferJob, ServeJob, TrainJob
from accelmark.spec.log.perflog import encode_line
from accelmark.spec.number_format import THIN
from accelmark.spec.settings.training import EndSettings
from tests.made_run import loaded
from tests.run.fakes import job_spec, make_plan


def line(event: str, **value: Any) -> str:
    return encode_line(event, value, {"time_ms": 0, "mono_ms": 0, "rank": 0}) + "\n"


def append(log: Path, *lines: str) -> None:
    with log.open("a") as stream:
        stream.writelines(lines)


def drawn(board: Board, width: int = 80) -> str:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(draw(board, width - 1))
    return capture.get()


def window(step: int, loss: float | None = 1.0) -> str:
    figures = {"learning_rate": 0.1, "losses": [loss] * 10, "step_ms": [], "data_wait_ms": [], "wall_ms": 100.0 * 10}
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
    append(log, line("FINISHED"))
    seen = follow.read()
    assert (seen.phase, seen.share, seen.eta_s) == ("finished", None, None), "what has ended is not in part done"


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
    append(log, line("EVALUATE", phase="inference", num_items=32, metrics={"accuracy": 0.5}))
    seen = follow.read()
    assert (seen.samples, seen.share, seen.eta_s) == (0, None, None)
    assert seen.metric == ("accuracy (engine, all passes)", 0.5)
    append(log, line("HEARTBEAT", phase="scenario server", num_requests=70, share=0.25, eta_s=30))
    seen = follow.read()
    assert (seen.phase, seen.samples, seen.share, seen.eta_s) == ("scenario server", 70, 0.25, 30)
    append(log, line("STAGE_BEGIN", step="summarise", number=7))
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
        append(log, *events)
        progress = follow.read()
        board = Board(make_plan(("toy",)), statuses, progress=progress)
        return plain_progress(progress, job).partition("  ")[2], drawn(board, 101)

    passed = line("EVALUATE", phase="validation", num_items=9, metrics={"loss": 0.4, "top1": 0.9164})
    plain, live = shown(passed, line("STAGE_BEGIN", step="infer", number=6))
    assert plain == "top1 (framework, data as published) 0.9164"
    assert plain in live
    plain, live = shown(line("EVALUATE", phase="inference", num_items=99, metrics={"loss": 0.4, "top1": 0.9158}))
    assert plain == "top1 (engine, all passes) 0.9158"
    checked = {"num_items": 9, "median_error": 0.0, "worst_error": 0.0, "top1_agreement": 1.0}
    metrics = {"engine_metrics": {"loss": 0.4, "top1": 0.9165}, "framework_metrics": {"loss": 0.4, "top1": 0.9161}}
    plain, live = shown(line("ANSWER_CHECK", **checked, **metrics))
    assert plain == "top1 0.91650, framework 0.91610 on the same inputs"
    assert plain in live


@pytest.mark.parametrize(("state", "option"), [("cancelled", ""), ("failed", " --failed"), ("succeeded", None)])
def test_status_and_stop_name_the_command_that_repeats_rounds(state: Any, option: str | None, tmp_path: Path) -> None:
    plan = make_plan(("toy",))
    directory = RunDirectory.create(tmp_path / "run", plan)
    log = directory.event_log()
    for each in ("preparing", "running", state):
        log.move(plan.jobs[0].directory, each)
    log.close()
    expected = "" if option is None else f"Continue with: accelmark resume {directory.path}{option}\n"
    output = io.StringIO()
    print_status(read_status(directory.path), Console(file=output, width=400))
    assert output.getvalue().partition("\n")[2] == expected
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


def test_the_display_draws_the_losses_and_the_devices_memory() -> None:
    plan = make_plan(())
    statuses = {plan.jobs[0].directory: JobStatus("running")}
    progress = JobProgress("training", 20, loss=1.0, devices=DeviceLoad(memory_used_mib=20480))
    text = drawn(Board(plan, statuses, progress=progress, losses=[8.0, 4.5, 1.0]))
    assert "loss █▅▁" in text
    assert "20.0\u202fGiB" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_display_never_wraps(width: int) -> None:
    plan = make_plan(*((),) * 12, repeat=2)
    names = [job.directory for job in plan.jobs]
    statuses = {name: JobStatus() for name in names}
    statuses[names[0]] = JobStatus("failed", "a reason that is much longer than any terminal is wide " * 4)
    statuses[names[1]] = JobStatus("running")
    progress = JobProgress("training", 123456, 10**6, 3, 10**7, 0.1234, ("accuracy", 0.5), 1e6, 10.0, 1e5, 0.12)
    board = Board(plan, statuses, progress=progress, notes=["x" * 300])
    lines = drawn(board, width).splitlines()
    assert all(len(shown) < width for shown in lines)  # what is typed behind a full line would begin a new one
    assert len(lines) <= 22


def test_the_terminal_shows_the_share_of_linear_speed_up_of_each_scale(tmp_path: Path) -> None:
    runs = [loaded(tmp_path / "one", jitter=0.0), loaded(tmp_path / "two", nproc=2, jitter=0.0, step_ms=12.5)]
    _, line = scaling_lines(scaling_curves(runs))
    (curve,) = scaling_curves(runs)
    shown = line.plain.replace(THIN, " ")
    assert shown.startswith(f"scaling {curve.model}:{curve.framework}:{curve.chip}  1×1 100 %  1×2 ")
    assert shown.endswith("%")


def shown(summary: Summary, run_dir: Path, width: int = 120) -> str:
    output = io.StringIO()
    print_summary(summary, run_dir, None, Console(file=output, width=width, highlight=False))
    return output.getvalue()


def test_an_invalid_result_has_no_tick_and_the_summary_names_the_vendor_and_its_hooks(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    assert "Vendor nvidia: standard cases, nothing changed" in shown(summary, tmp_path / "run")
    hooks = (ReplacedHook(name="create_optimizer", place="extern/__init__.py:4", num_lines=3),)
    changed = {"verdict": "INVALID", "reasons": ("why",), "adaptation": AdaptationCost(hooks=hooks)}
    (case,) = summary.cases
    text = shown(summary.model_copy(update={"cases": (case.model_copy(update=changed),)}), tmp_path / "run")
    assert "✓" not in text
    assert "✕" in text
    assert "Vendor nvidia changed toy: hook create_optimizer" in text
    assert "resume" not in text
