from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.results.figures import FigureName as F
from accelmark.results.rounds.summary import write_round
from accelmark.results.store.bundle import check_manifest
from accelmark.run.record.directory import measure_run
from tests.made_run import Made, make_run


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
