"""``accelmark check case NAME --frameworks pytorch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.cli.folders import new_folder
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE

CHECK = ("check", "case", "dots", "--frameworks", "pytorch", "--synthetic", "--steps", "3", "--set", "precision=fp32")


@pytest.mark.heavy
def test_one_rank_and_two_are_compared_and_the_record_has_its_scope(tmp_path: Path) -> None:
    new_folder("cases", "dots", tmp_path)
    variables = {PLUGINS_VARIABLE: str(tmp_path), "ACCELMARK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelmark", *CHECK, "--json", "--vendor", "cpu"]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)
    assert check["equivalent"]
    (job,) = check["jobs"]
    assert (job["framework"], job["num_ranks"], job["first_difference"]) == ("pytorch", 2, None)
    assert (check["case"], check["precision"], check["num_steps"], check["synthetic"]) == ("dots", "fp32", 3, True)
    assert job["errors"]["weights"] < check["tolerance"]["weights"]
