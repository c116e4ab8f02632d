"""Hosts whose only Python is older than the coordinator's: `make test-versions` names one in ACCELMARK_OLD_PYTHON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.results.read.reevaluation import read_reevaluation
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.conftest import status_of
from tests.cluster.test_containers import CASE, TINY, accelmark, run_file

PYTHON = os.environ.get("ACCELMARK_OLD_PYTHON")


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.skipif(PYTHON is None, reason="ACCELMARK_OLD_PYTHON names no Python with PyTorch")
def test_agents_and_ranks_run_on_the_python_of_the_hosts(
    cluster: Callable[..., ClusterSpec], plugins: Path, tmp_path: Path
) -> None:
    case = plugins / "cases" / "tiny"
    case.mkdir()
    (case / "case.yaml").write_text(CASE)
    shutil.copy(TINY, case / "pytorch.py")
    run = tmp_path / "run"
    file = run_file(tmp_path, cluster(2, python=PYTHON), "tiny:pytorch:X1:2:1:1")
    ended = accelmark("run", str(file), "--set", "threads=1", "--out", str(run), "--json")
    said = ended.stdout + ended.stderr + "".join(log.read_text() for log in run.rglob("*.log"))
    assert status_of(run)[0].state == "succeeded", said
    (round_dir,) = run.glob("*/round1")
    found = read_reevaluation(round_dir)
    assert found is not None, said
    assert found.problem is None, said
    (agent,) = {json.loads(path.read_text())["python"] for path in round_dir.glob("n*/sys_info.json")}
    assert agent.startswith("3.9"), agent
    (summary,) = json.loads((run / "summary.json").read_text())["cases"]
    rules = {finding["rule"] for finding in summary["findings"] if finding["severity"] in ("error", "open")}
    assert rules == {"telemetry-missing"}, summary["findings"]  # the made-up vendor has no monitor of its devices
