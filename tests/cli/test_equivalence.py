"""``accelmark check case NAME --frameworks pytorch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import accelmark
from accelmark.cli import equivalence
from accelmark.cli.equivalence import CheckRequest, _show, compare_frameworks
from accelmark.cli.folders import new_folder
from accelmark.cli.main import app
from accelmark.results.equivalence import describe
from accelmark.run.record.states import JobStatus
from accelmark.spec.equivalence import EquivalenceCheck
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE

CHECK = ("check", "case", "dots", "--frameworks", "pytorch", "--synthetic", "--steps", "3", "--set", "precision=fp32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("equivalence")
    new_folder("cases", "dots", place)
    return place


def run_accelmark(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "PYTHONPATH": str(Path(accelmark.__file__).parents[1]),
        PLUGINS_VARIABLE: str(place),
        "ACCELMARK_CACHE": str(place / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments]
    return subprocess.run(
        command, env={**os.environ, **variables}, cwd=place, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture(scope="module")
def check(place: Path) -> dict[str, Any]:
    done = run_accelmark(place, *CHECK, "--json", "--vendor", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_each_precision_is_announced_with_its_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_computed(plan: Any, path: Path, fetch: Any, preflight: Any, observer: Any, *_: int) -> tuple[()]:
        for job in plan.jobs:
            observer.state(job, JobStatus(state="running"))
        return ()

    monkeypatch.setattr(equivalence, "check_equivalence", none_computed)  # the jobs are run by the tests below
    with pytest.raises(RequestError, match="no job computed in fp32, bf16"):
        compare_frameworks(CheckRequest("llama_mini", "pytorch", None, "cpu", (), True, 8), None, as_json=False)
    jobs = [f"llama_mini:pytorch:CPU:1:{nproc}:1: running" for nproc in (1, 2)]
    announced = [f"{precision}: {job}" for precision in ("fp32", "bf16") for job in jobs]
    assert capsys.readouterr().out.splitlines() == announced


def test_a_framework_that_the_case_has_not_is_one_problem() -> None:
    with pytest.raises(RequestError, match=r"'minilm_finetune' has no framework 'jax' \(it has: pytorch\)") as caught:
        compare_frameworks(CheckRequest("minilm_finetune", "jax", None, "cpu", (), True, 8), None, as_json=False)
    assert "\n" not in str(caught.value)


def test_a_check_that_the_user_ends_says_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(equivalence, "check_equivalence", interrupted)
    for more, kept in ((), "nothing was kept"), (("--out", "there"), "there has the computed results"):
        arguments = ["check", "case", "llama_mini", "--frameworks", "pytorch", "--synthetic", "--vendor", "cpu", *more]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code != 0
        assert f"the check was stopped before its end; {kept}" in done.stderr


def test_the_table_of_errors_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"outputs": 2.1e-5, "loss": 1.2e-7, "weights": 5.4e-3}
    job = {
        "framework": "pytorch", "framework_version": "2.15.0+cu132", "library_versions": {}, "num_ranks": 2,
        "errors": errors, "first_difference": None,
    }  # fmt: skip
    check = {
        "case": "dots", "case_version": 1,
        "framework": "pytorch", "device_type": "cpu", "precision": "fp32", "reference": "pytorch",
        "reference_version": "2.15.0+cu132", "num_steps": 3, "synthetic": True, "jobs": [job], "checked_at": "",
        "tolerance": {"outputs": 1e-3, "loss": 1e-4, "weights": 5e-2},
    }  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    found = EquivalenceCheck.model_validate(check)
    _show([found])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert max(map(len, lines)) <= 80
    assert len(describe(found)) > 80
    assert describe(found) in " ".join(line.strip() for line in lines), "broken between words"
    assert ["tolerance", "fp32", "1e-03", "1e-04", "5e-02"] in rows
    assert ["pytorch", "2.15.0+cu132", "2", "fp32", "2e-05", "1e-07", "5e-03", "equivalent"] in rows


@pytest.mark.heavy
def test_one_rank_and_two_are_compared_and_the_record_has_its_scope(check: dict[str, Any]) -> None:
    assert check["equivalent"]
    (job,) = check["jobs"]
    assert (job["framework"], job["num_ranks"], job["first_difference"]) == ("pytorch", 2, None)
    assert (check["case"], check["precision"], check["num_steps"], check["synthetic"]) == ("dots", "fp32", 3, True)
    assert job["errors"]["weights"] < check["tolerance"]["weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "case", "dots", "--frameworks", "torch"), "unknown framework 'torch'"),
        (("check", "vendor", "cpu", "--frameworks", "pytorch"), "compares the frameworks of a case"),
        (("check", "case", "dots", "--synthetic"), "are for --frameworks"),
        ((*CHECK[:-1], "precision=fp16"), "no tolerance was measured for it"),
        ((*CHECK[:-1], "gradient_accumulation_steps=1"), "a step has 2 batches here"),
    ],
)
def test_wrong_requests_are_refused_before_a_start(place: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_accelmark(place, *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
