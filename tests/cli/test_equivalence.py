"""``accelmark check case NAME --frameworks pytorch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accelmark
from accelmark.cli.folders import new_folder
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


@pytest.mark.heavy
def test_one_rank_and_two_are_compared_and_the_record_has_its_scope(check: dict[str, Any]) -> None:
    assert check["equivalent"]
    (job,) = check["jobs"]
    assert (job["framework"], job["num_ranks"], job["first_difference"]) == ("pytorch", 2, None)
    assert (check["case"], check["precision"], check["num_steps"], check["synthetic"]) == ("dots", "fp32", 3, True)
    assert job["errors"]["weights"] < check["tolerance"]["weights"]
