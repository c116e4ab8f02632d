from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accelmark.results.cluster import scaling_curves
from accelmark.results.figures import FigureName
from accelmark.results.figures import FigureName as F
from accelmark.results.rounds.summary import (
    finding_texts,
    rounds_needed,
    spread,
    spread_warnings,
    student_t,
    write_round,
)
from accelmark.results.schema import Figure, Finding, Spread
from accelmark.results.statistics import change_points, levels
from accelmark.results.store.bundle import check_manifest
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.run.record.directory import measure_run
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from tests.made_run import Made, loaded, make_run


def test_a_consistent_run_is_valid_with_intervals(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=3, jitter=0.1))
    case = measure_run(run).cases[0]
    assert (case.verdict, case.reasons, case.state, case.converged) == ("VALID", (), "succeeded", True)
    throughput = case.figures[F.THROUGHPUT_TRAIN]
    assert throughput.num_rounds == 3
    assert throughput.ci95 is not None
    assert case.rounds == tuple(f"toy-pytorch-X1x1x1/round{n}" for n in (1, 2, 3))


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
    write_round(run / "toy-pytorch-X1x1x1" / "round2", state="failed", reason="out of memory")
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
    summary = measure_run(run)
    assert "round2/job.json" in summary.problems[0]
    assert summary.cases[0].verdict == "INVALID"
    assert summary.cases[0].figures[F.THROUGHPUT_TRAIN].num_rounds == 1


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
    needed = rounds_needed(100, 2)
    assert needed == 18  # t(17) x 2 / sqrt(18) = 0.9946, t(16) x 2 / sqrt(17) = 1.0283
    assert student_t(17) * 2 / math.sqrt(18) <= 1 < student_t(16) * 2 / math.sqrt(17)


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
    assert finding_texts(told, "warning") == ["rounds 1, 3: a (expected: e) [r]", "b (expected: e) [r]"]


def test_a_figure_that_fewer_rounds_have_says_how_many() -> None:
    def of(*values: float) -> Spread:
        return spread([Figure(value=value) for value in values])

    figures = {FigureName.THROUGHPUT_STEADY: of(1.0, 2.0, 3.0), FigureName.TIME_TO_TARGET: of(1.0, 2.0)}
    (warning,) = spread_warnings(figures, CaseKey.parse("toy", hardware="X1"))
    assert "after 3 rounds: throughput, steady ±124 %; time to target ±424 % (2 rounds)." in warning


def test_a_single_round_has_no_interval_and_the_warning_has_the_key_of_three() -> None:
    figures = {FigureName.THROUGHPUT_STEADY: spread([Figure(value=1.0)])}
    (warning,) = spread_warnings(figures, CaseKey.parse("toy:pytorch:X1:2:8", hardware="X1"))
    assert warning.endswith("only one round. For three rounds, use toy:pytorch:X1:2:8:3")


def noisy(*segments: tuple[float, int]) -> list[float]:
    noise = random.Random(7)
    return [level * (1 + noise.gauss(0, 0.01)) for level, count in segments for _ in range(count)]


def test_changes_are_found_where_they_were_made() -> None:
    values = noisy((100, 12), (110, 9), (95, 14))
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
