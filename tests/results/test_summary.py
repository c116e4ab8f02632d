"""Rounds and their summaries: intervals, verdicts, rounds that did not end well, other work on the machine."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.results.cluster import scaling_curves
from accelmark.results.figures import FigureName as F
from accelmark.results.read.round_dir import NodeDir, SavedCheckpoints
from accelmark.results.rounds import summary
from accelmark.results.rounds.hosts import contention_findings, device_indices, disturbances
from accelmark.results.rounds.summary import round_result, spread
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import pace_findings
from accelmark.results.schema import Figure, Finding
from accelmark.results.statistics import change_points, levels
from accelmark.results.store.bundle import check_manifest
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.run.record.directory import measure_run
from accelmark.spec.job import NodeExit, RankExit
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from accelmark.spec.log.events import CheckpointHashes, Event
from accelmark.spec.log.inference import ServeFinished
from tests.made_run import BOOT_MS, Made, change_json, change_lines, end_round, loaded, make_run, perflog, rank_events


def test_a_wide_interval_warns_with_the_number_of_rounds_needed(tmp_path: Path) -> None:
    case = measure_run(make_run(tmp_path / "run", Made(rounds=3, jitter=20.0))).cases[0]
    (wide,) = (warning for warning in case.warnings if "rounds are needed for 1 %" in warning)
    assert wide.endswith("rounds are needed for 1 %: reduce the noise first, by an idle host or longer rounds")


@pytest.mark.parametrize(
    ("made", "verdict", "reason"),
    [
        (Made(is_open=True), "OPEN", "started with --open"),
        (Made(synthetic=True), "INVALID", "synthetic"),
        (Made(metrics=(0.1, 0.2)), "INVALID", "the target was not reached"),
        (Made(min_rounds=3), "INVALID", "[too-few-rounds]"),
        (Made(telemetry=False), "INVALID", "telemetry-missing"),
    ],
)
def test_verdicts_have_their_reasons(tmp_path: Path, made: Made, verdict: str, reason: str) -> None:
    case = measure_run(make_run(tmp_path / "run", made)).cases[0]
    assert case.verdict == verdict
    assert any(reason in given for given in case.reasons)


def test_a_failed_round_fails_the_case_and_keeps_figures_of_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    end_round(run / "toy-pytorch-X1x1x1" / "round2", "failed", "out of memory")
    case = measure_run(run).cases[0]
    assert (case.state, case.verdict) == ("failed", "INVALID")
    assert any("round 2 failed: out of memory" in reason for reason in case.reasons)
    assert case.figures[F.THROUGHPUT_TRAIN].num_rounds == 1


@pytest.mark.parametrize(
    ("told", "state"), [(None, "queued"), ("queued", "queued"), ("cancelled", "cancelled"), ("succeeded", "lost")]
)
def test_missing_rounds_are_reported(tmp_path: Path, told: str | None, state: str) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    (run / "toy-pytorch-X1x1x1" / "round2" / "job.json").unlink()
    event = {"kind": "state", "job": "toy-pytorch-X1x1x1/round2", "state": told, "reason": "as it came"}
    (run / "events.jsonl").write_text("" if told is None else json.dumps(event) + "\n")
    case = measure_run(run).cases[0]
    assert (case.state, case.verdict) == (state, "INVALID")
    assert any("1 of 2 planned rounds succeeded, 1 has no result" in reason for reason in case.reasons)


def test_files_written_after_the_summary_are_not_in_the_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "slurm.job").write_text("7")
    measure_run(run)
    assert "slurm.job" not in (run / "MANIFEST.sha256").read_text()
    (run / "slurm.job").unlink()
    (run / "coordinator.log").write_text("closed a connection")
    assert check_manifest(run) == []
    (run / "toy-pytorch-X1x1x1" / "coordinator.log").write_text("of nobody")
    assert check_manifest(run) == ["toy-pytorch-X1x1x1/coordinator.log: was added (not in the manifest)"]


def test_a_manifest_cannot_reach_outside(tmp_path: Path) -> None:
    (tmp_path / "MANIFEST.sha256").write_text(f"{'0' * 64}  ../secret\n")
    assert "is not a line of a manifest" in check_manifest(tmp_path)[0]


def test_a_corrupt_round_is_a_problem_of_the_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    (run / "toy-pytorch-X1x1x1" / "round2" / "job.json").write_text("{")
    found = measure_run(run)
    assert "round2/job.json" in found.problems[0]
    assert found.cases[0].verdict == "INVALID"
    assert found.cases[0].figures[F.THROUGHPUT_TRAIN].num_rounds == 1


def test_reading_results_imports_nothing_heavy() -> None:
    code = (
        "import sys, accelmark.results.rounds.summary, accelmark.results.store.loaded_run;"
        "import accelmark.report.run_page, accelmark.cli.results;"
        "print([name for name in ('numpy', 'scipy', 'plotly', 'jinja2', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_interval_is_the_one_worked_out_by_hand() -> None:
    found = spread([Figure(value=value) for value in (98.0, 100.0, 102.0)])
    half = 4.30265 * 2 / math.sqrt(3)
    assert found.mean == 100
    assert found.stdev == pytest.approx(2)
    assert found.ci95 == pytest.approx((100 - half, 100 + half), rel=1e-5)


def test_the_recommended_number_of_rounds_is_the_least_sufficient() -> None:
    needed = summary.rounds_needed(100, 2)
    assert needed == 18  # t(17) x 2 / sqrt(18) = 0.9946, t(16) x 2 / sqrt(17) = 1.0283
    assert summary.student_t(17) * 2 / math.sqrt(18) <= 1 < summary.student_t(16) * 2 / math.sqrt(17)


@pytest.mark.parametrize(
    ("figures", "spread_of"),
    [
        ([Figure(value=5.0)], (5.0, None, 1, None)),
        ([Figure(value=None, reason="no counter")] * 2, (None, None, 0, "no counter")),
        ([], (None, None, 0, "no round succeeded")),
    ],
)
def test_fewer_than_two_values_have_no_interval(
    figures: list[Figure], spread_of: tuple[float | None, None, int, str | None]
) -> None:
    found = spread(figures)
    assert (found.mean, found.ci95, found.num_rounds, found.reason) == spread_of


def test_a_warning_of_several_rounds_is_shown_once() -> None:
    one = Finding(severity="warning", rule="r", expected="e", actual="a")
    changes: tuple[dict[str, object], ...] = ({"round": 3}, {"round": 1}, {"actual": "b"}, {"severity": "error"})
    told = [one.model_copy(update=change) for change in changes]
    assert summary.finding_texts(told, "warning") == ["rounds 1, 3: a (expected: e) [r]", "b (expected: e) [r]"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {F.THROUGHPUT_STEADY: (1.0, 2.0, 3.0), F.TIME_TO_TARGET: (1.0, 2.0)},
            "after 3 rounds: throughput, steady ±124 %; time to target ±424 % (2 rounds).",
        ),
        ({F.THROUGHPUT_STEADY: (1.0,)}, "only one round. For three rounds, use toy:pytorch:X1:2:8:3"),
    ],
)
def test_a_wide_interval_names_its_rounds_a_missing_one_the_key(values: dict[F, tuple[float, ...]], told: str) -> None:
    figures = {name: spread([Figure(value=value) for value in of]) for name, of in values.items()}
    (warning,) = summary.spread_warnings(figures, CaseKey.parse("toy:pytorch:X1:2:8", hardware="X1"))
    assert told in warning


def test_changes_are_found_where_they_were_made() -> None:
    noise, segments = random.Random(7), ((100, 12), (110, 9), (95, 14))
    values = [level * (1 + noise.gauss(0, 0.01)) for level, count in segments for _ in range(count)]
    assert change_points(values) == [12, 21]
    assert [(begin, end) for begin, end, _ in levels(values, [12, 21])] == [(0, 12), (12, 21), (21, 35)]


@pytest.mark.parametrize("count", [6, 20])
def test_outliers_over_many_series_are_ignored_and_shifts_are_found(count: int) -> None:
    num_series = 200
    alarms = outliers = found = 0
    for seed in range(num_series):
        noise = random.Random(seed)
        steady = [1000 + noise.gauss(0, 10) for _ in range(count)]
        alarms += change_points(steady) != []
        place, middle = noise.randrange(count), count // 2
        outliers += change_points([*steady[:place], steady[place] - 300, *steady[place + 1 :]]) != []
        found += change_points([*steady[:middle], *(value + 60 for value in steady[middle:])]) == [middle]
    assert alarms <= 0.1 * num_series
    assert outliers <= 0.13 * num_series
    assert found >= 0.88 * num_series


def test_efficiency_is_the_speed_up_over_the_ratio_of_ranks(tmp_path: Path) -> None:
    runs = [
        loaded(tmp_path / "one", rounds=1, jitter=0.0),
        loaded(tmp_path / "two", rounds=1, jitter=0.0, nproc=2, step_ms=10.25, data_wait_ms=1.0),
        loaded(tmp_path / "four", rounds=1, jitter=0.0, nnodes=2, nproc=2, step_ms=11.5),
        loaded(tmp_path / "other", rounds=1, jitter=0.0, precision="fp32"),
    ]
    [curve] = scaling_curves(runs)
    assert [point.scale for point in curve.points] == ["1×1", "1×2", "2×2"]
    # A step and its data take 10, 11.25 and 12.5 ms, so that a rank keeps 10/11.25 and 10/12.5 of its speed.
    assert [point.efficiency for point in curve.points] == pytest.approx([1, 10 / 11.25, 0.8], rel=1e-6)
    assert [point.speedup for point in curve.points] == pytest.approx([1, 20 / 11.25, 3.2], rel=1e-6)
    assert curve.same_batch


def test_scales_with_other_settings_are_not_one_curve_except_batch_size(tmp_path: Path) -> None:
    one, two = loaded(tmp_path / "one", rounds=1), loaded(tmp_path / "two", rounds=1, nproc=2)

    def with_setting(name: str, value: object) -> LoadedRun:
        setting = Provenance(value=value, layer="command line")
        rounds = {
            place: result.model_copy(update={"settings": {**result.settings, name: setting}})
            for place, result in two.rounds.items()
        }
        return replace(two, rounds=rounds)

    assert len(scaling_curves([one, with_setting("batch_size", 4)])) == 1
    assert scaling_curves([one, with_setting("channels_last", True)]) == []


@pytest.fixture
def round_dir(tmp_path: Path) -> Path:
    made = Made(nproc=2)
    return make_run(tmp_path / "run", made) / made.key.slug / "round1"


def node(round_dir: Path) -> Path:
    return round_dir / "node00_noderank0"


def cut(path: Path, keep: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))


def test_a_rank_that_died_fails_the_round_with_its_reason(round_dir: Path) -> None:
    dead = RankExit(rank=1, local_rank=1, state="signaled", exit_code=-9, signal="SIGKILL", reason="killed by SIGKILL")
    change_json(node(round_dir) / "exit.json", state="failed", ranks=[dead.model_dump()])
    for rank in (0, 1):
        cut(node(round_dir) / f"rank{rank}.out.log", 7)
    result = round_result(round_dir)
    assert (result.state, result.reason) == ("failed", "node00, rank 1: killed by SIGKILL")
    assert "partial" in result.marks
    assert result.num_steps == 40
    assert result.figures[F.RAW_TRAIN_TIME].value == pytest.approx(0.4)
    assert result.figures[F.THROUGHPUT_TRAIN].value == pytest.approx(40 * 8 * 2 * 16 / 0.4)
    assert "wrote no FINISHED event" in (result.figures[F.MFU].reason or "")


def test_a_host_without_an_exit_is_lost(round_dir: Path) -> None:
    (round_dir.parents[1] / "events.jsonl").unlink()
    (node(round_dir) / "exit.json").unlink()
    result = round_result(round_dir)
    assert result.state == "lost"
    assert "node00" in (result.reason or "")
    shutil.rmtree(node(round_dir))
    assert round_result(round_dir).state == "queued"
    end_round(round_dir, "timed_out", "no end after 10 s")
    result = round_result(round_dir)
    assert (result.state, result.reason) == ("timed_out", "no end after 10 s"), "the coordinator's record counts"


def test_training_that_never_began_has_no_rates(round_dir: Path) -> None:
    for rank in (0, 1):
        cut(node(round_dir) / f"rank{rank}.out.log", 2)
    result = round_result(round_dir)
    assert result.figures[F.RAW_TRAIN_TIME].reason == "training did not start"
    assert result.figures[F.THROUGHPUT_TRAIN].reason == "training did not start"
    assert result.figures[F.E2E_TIME].value == pytest.approx(1.9)


def test_a_loss_that_is_not_finite_is_found(round_dir: Path) -> None:
    log = node(round_dir) / "rank0.out.log"
    lines = log.read_text().splitlines(keepends=True)
    record = json.loads(lines[-4].removeprefix("[PerfLog] "))
    assert record["event"] == "STEP_END"
    record["value"]["losses"][-1] = None
    record["value"]["loss"] = None
    record["value"]["nonfinite"] = ["loss", "losses"]
    lines[-4] = perflog("STEP_END", record["value"], record["metadata"]["mono_ms"], 0)
    log.write_text("".join(lines))
    result = round_result(round_dir)
    assert result.figures[F.FINAL_LOSS].reason == "the loss of step 100 is not finite"
    (found,) = (finding for finding in result.findings if finding.rule == "loss-not-finite")
    assert found.actual == "the loss of step 100 is NaN or infinite"


def test_a_missing_rank_is_an_error_of_the_result(round_dir: Path) -> None:
    (node(round_dir) / "rank1.out.log").unlink()
    assert ("ranks-missing", "error") in {(f.rule, f.severity) for f in round_result(round_dir).findings}


def test_bad_lines_are_reported_and_the_rest_counts(round_dir: Path) -> None:
    log = node(round_dir) / "rank0.out.log"
    text = log.read_text()
    log.write_text('[PerfLog] {"event": oops\n\x00\x01noise\n' + text)
    result = round_result(round_dir)
    assert result.figures[F.THROUGHPUT_TRAIN].value == pytest.approx(25600)
    found = [finding.actual for finding in result.findings if not finding.actual.startswith("energy was measured over")]
    assert found == ["rank 0: 1 malformed PerfLog lines (lines 1)"]


@pytest.mark.parametrize("is_continued", [True, False])
def test_an_earlier_attempt_counts_where_the_last_one_continues_it(tmp_path: Path, is_continued: bool) -> None:
    """``accelmark resume`` has moved its log; a round that begins anew does not count it."""
    made = Made(eval_windows=(), metrics=(), target=None)
    round_dir = make_run(tmp_path / "run", made) / made.key.slug / "round1"
    log = node(round_dir) / "rank0.out.log"
    earlier = round_dir / "attempt1" / log.parent.name / log.name
    earlier.parent.mkdir(parents=True)
    earlier.write_text("".join(log.read_text().splitlines(keepends=True)[:10]))  # killed after window 7
    end = json.loads((log.parent / "exit.json").read_text())
    began = "2020-02-02T02:02:02.000Z"
    (earlier.parent / "exit.json").write_text(json.dumps(end | {"started_at": began}))
    record, later_ms = log.with_name("telemetry.jsonl"), 100_000
    (earlier.parent / record.name).write_text(record.read_text())
    change_lines(record, lambda entry: entry | ({"t": entry["t"] + later_ms / 1e3} if "t" in entry else {}))
    log.write_text(
        "".join(
            perflog(event, value | ({"resumed": is_continued} if event == "TRAIN_START" else {}), mono_ms + later_ms, 0)
            for event, value, mono_ms in rank_events(made, 0)
            if event != "STEP_END" or not is_continued or value["global_steps"] > 50
        )
    )
    result = round_result(round_dir)
    assert ("resumed" in result.marks) == is_continued
    assert result.started_at == (began if is_continued else end["started_at"])
    assert any(found.rule == "resumed" for found in result.findings) != is_continued, "it was started again"
    assert result.num_steps == 100
    assert result.figures[F.RAW_TRAIN_TIME].value == pytest.approx(1.0 + (0.7 if is_continued else 0))
    assert result.figures[F.E2E_TIME].value == pytest.approx(3.1 + (2.7 if is_continued else 0))
    assert result.figures[F.THROUGHPUT_TRAIN].value == pytest.approx(12800 / (1.7 if is_continued else 1))
    assert result.figures[F.TELEMETRY_CPU_TIME].value == pytest.approx(0.125 * (2 if is_continued else 1))
    assert result.figures[F.ENERGY].value == pytest.approx(made.power_w * (1.7 if is_continued else 1))
    (power,) = (series for series in result.telemetry if series.quantity == "power")
    times = [time_s for time_s, _ in power.points]
    assert times == sorted(times), "one axis with the curves: raw training time of both attempts"
    assert times[0] == pytest.approx(-3, abs=0.3)
    assert times[-1] == pytest.approx((1.7 if is_continued else 1) + 1.1, abs=0.3)


def test_other_work_before_the_run_and_on_a_device_is_marked(round_dir: Path) -> None:
    change_json(node(round_dir) / "sys_info.json", busy_at_start=["80% of the cores are busy"])
    with (node(round_dir) / "telemetry.jsonl").open("a") as file:
        file.write(json.dumps({"note": {"t": 1.0, "what": "foreign process 12 (python) on device 0"}}) + "\n")
    result = round_result(round_dir)
    assert "busy_machine" in result.marks
    assert {"foreign-process", "busy-at-start"} <= {finding.rule for finding in result.findings}


def test_devices_selected_by_uuid_are_matched_by_uuid(tmp_path: Path) -> None:
    uuids = ("GPU-aa11", "GPU-bb22-c3", "GPU-bb44", None)
    infos: dict[int, dict[str, Any]] = {index: {"uuid": uuid} for index, uuid in enumerate(uuids)}
    assert device_indices(["GPU-bb22-c3", "gpu-aa"], infos) == [1, 0]
    assert device_indices(["3", "1"], infos) == [3, 1]
    assert device_indices(["GPU-bb"], infos) == []  # not unique
    assert device_indices(["0", "MIG-1234"], infos) == []
    made = Made()
    round_dir = make_run(tmp_path / "run", made) / made.key.slug / "round1"
    path = node(round_dir)
    change_lines(path / "telemetry.jsonl", _with_second_device)
    task = {"nproc": 1, "visible_devices": {"variable": "ACME_VISIBLE_DEVICES", "count": 1}}
    (path / "agent.json").write_text(json.dumps(task))
    energies: dict[str, float | None] = {}
    for uuid in ("GPU-0000", "GPU-1111", "GPU-2222", ""):
        change_json(path / "sys_info.json", environment={"ACME_VISIBLE_DEVICES": uuid})
        energies[uuid] = round_result(round_dir).figures[F.ENERGY].value
    assert energies["GPU-0000"] is not None
    assert energies["GPU-1111"] == pytest.approx(2 * energies["GPU-0000"])
    assert energies["GPU-2222"] is None
    assert energies[""] == energies["GPU-0000"], "without a selection, one rank has the first device"


def _with_second_device(line: dict[str, Any]) -> dict[str, Any]:
    """Add a second device to a line of telemetry that draws twice the power of the first."""
    if "header" in line:
        first = line["header"]["devices"][0]
        both = [first | {"uuid": "GPU-0000"}, first | {"index": 1, "uuid": "GPU-1111"}]
        return {"header": line["header"] | {"devices": both}}
    if "t" in line:
        first = line["devices"][0]
        return line | {"devices": [first, first | {"index": 1, "power_w": 2 * first["power_w"]}]}
    return line


def test_replaced_training_samples_are_named_and_mark_the_round(round_dir: Path) -> None:
    for rank, bad in ((0, "a.jpg: truncated"), (1, "b.jpg: truncated")):
        log = node(round_dir) / f"rank{rank}.out.log"
        lines = log.read_text().splitlines(keepends=True)
        lines.insert(7, perflog(Event.BAD_SAMPLE, {"message": bad}, BOOT_MS + 1, rank))
        log.write_text("".join(lines))
    result = round_result(round_dir)
    assert result.marks == ("bad_samples",)
    (found,) = [each for each in result.findings if each.rule == "samples-replaced"]
    assert (found.severity, found.actual[:27]) == ("open", "2 training samples cannot b")
    assert found.actual.endswith("a.jpg: truncated; b.jpg: truncated")


def ended(core_wait_s: float | None) -> ServeFinished:
    return ServeFinished(state="completed", end_reason="completed", e2e_time=100.0, core_wait_s=core_wait_s)


@pytest.mark.parametrize(
    ("others_cpu_s", "rule", "told"),
    [
        (
            None,
            "cpu-contention",
            "31\u202f% of the time (limit 2\u202f%): other work may have used them. Use an idle host.",
        ),
        (20.0, "cpu-contention", "other work used up to 20.0 s of CPU time"),
        (2.0, "oversubscribed", "more threads than cores"),
    ],
)
def test_a_rank_that_waited_for_a_core_is_found_and_other_work_only_if_it_used_enough_cpu_time(
    tmp_path: Path, others_cpu_s: float | None, rule: str, told: str
) -> None:
    end = NodeExit(
        host="n1", noderank=0, state="succeeded", reason=None, started_at="", duration_s=100.0, ranks=(),
        others_cpu_s=others_cpu_s,
    )  # fmt: skip
    ends = {0: ended(0.4), 1: ended(31.0), 2: None, 3: ended(None)}
    (found,) = contention_findings([NodeDir(tmp_path, "n1", 0, end, None)], ends)
    assert (found.severity, found.rule) == ("warning", rule)
    assert found.actual.startswith("rank 1 waited for CPU cores")
    assert told in found.actual
    disturbing = [found.actual.removesuffix(". Use an idle host.")] if rule == "cpu-contention" else []
    assert disturbances([found]) == disturbing


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits")
def test_cpu_contention_on_the_same_core_is_measured_as_waiting() -> None:
    """A process that shares its core with two others waits for two thirds of the time."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    asked = (
        f"import os, time; os.sched_setaffinity(0, {{{core}}})\n"
        "from accelmark.train.loop.process import CpuWait\n"
        "wait, began = CpuWait(), time.monotonic()\n"
        "while time.monotonic() - began < 1.5: pass\n"
        "print(wait.longest_s())"
    )
    others = [subprocess.Popen([sys.executable, "-c", busy], start_new_session=False) for _ in range(2)]
    try:
        told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert float(told) > 0.5


def checkpoints(*pairs: tuple[int | None, int]) -> SavedCheckpoints:
    steps = {f"step{step}": step for pair in pairs for step in pair if step is not None}
    named = tuple((None if start is None else f"step{start}", f"step{end}") for start, end in pairs)
    hashes = CheckpointHashes(
        sha256=dict.fromkeys(steps, "00"), pairs=named, claimed=None, final=None, num_bytes=0, duration_s=0, reason=None
    )
    return SavedCheckpoints(steps, hashes, {})


PAIRS = checkpoints((None, 10), (10, 40), (60, 80))
OUTSIDE = ("warning", "replay", "40\u202f% of the steps are in no pair")


@pytest.mark.parametrize(
    ("step_ms", "pairs", "expected"),
    [
        (lambda _: 10, PAIRS, [OUTSIDE]),
        (
            lambda step: 10 if step <= 40 or 60 < step <= 80 else 7,
            PAIRS,
            [OUTSIDE, ("open", "replayed-pace", "took 30\u202f% less time")],
        ),
        (lambda step: 90 if step in (30, 70) else 10, PAIRS, [OUTSIDE]),
        (lambda step: 30 if step <= 40 else 10, PAIRS, [OUTSIDE]),
        (float, checkpoints((None, 10), (10, 60), (60, 100)), []),
    ],
    ids=("steady", "faster between pairs", "interrupted in pairs", "one slow pair", "all in pairs"),
)
def test_steps_outside_of_pairs_are_counted_and_named_where_they_are_faster(
    tmp_path: Path, step_ms: Callable[[int], float], pairs: SavedCheckpoints, expected: list[tuple[str, str, str]]
) -> None:
    """Of 100 steps in windows of 10; ``step_ms``: of the number of steps done at the end of a window."""
    log = node(make_run(tmp_path / "run") / "toy-pytorch-X1x1x1" / "round1") / "rank0.out.log"
    timeline = read_timeline([(0, log)])
    assert timeline is not None
    windows = timeline.windows
    ends = zip(windows["steps"], windows["lengths"], strict=True)
    wall_s = np.array([length * step_ms(int(step)) / 1e3 for step, length in ends])
    found = list(pace_findings(timeline._replace(windows={**windows, "wall_s": wall_s}), pairs))
    assert [(one.severity, one.rule) for one in found] == [(severity, rule) for severity, rule, _ in expected]
    assert all(words in one.actual for one, (_, _, words) in zip(found, expected, strict=True))
