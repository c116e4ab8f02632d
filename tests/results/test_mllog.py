"""MLLOG lines are judged by MLCommons' own checker (package mlperf-logging), on a generated run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.results.mllog import RULESET, write_mllog
from accelmark.results.store import check_manifest
from accelmark.run.measure import measure_run
from accelmark.spec.errors import RunError
from tests.made_run import Made, make_run


@pytest.mark.parametrize("model", ["resnet50", "bert"])
def test_the_compliance_checker_passes_on_a_finished_run(tmp_path: Path, model: str) -> None:
    run = make_run(tmp_path / "run", Made(model=model))
    measure_run(run)
    (path,) = write_mllog(run)
    assert check_manifest(run) == []
    done = check(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_checker_refuses_what_is_broken(tmp_path: Path) -> None:
    (path,) = write_mllog(make_run(tmp_path / "run", Made(model="bert")))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"run_stop"' not in line))
    assert check(path, tmp_path).returncode != 0


def test_a_run_that_did_not_finish_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for log in run.rglob("rank0.out.log"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(RunError, match="nothing for MLLOG"):
        write_mllog(run)


def check(path: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", RULESET]
    command += ["--log_output", str(directory / "checker.log"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
