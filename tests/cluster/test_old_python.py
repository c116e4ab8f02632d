"""Hosts and containers with an older Python than the coordinator's; `make test-versions` sets ACCELMARK_OLD_PYTHON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.results.read.reevaluation import read_reevaluation
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.cluster.conftest import status_of
from tests.cluster.skeleton import write_rootfs
from tests.cluster.test_containers import CASE, TINY, accelmark, run_file
from tests.cluster.test_images import podman

PYTHON = os.environ.get("ACCELMARK_OLD_PYTHON", "")
IMAGE = "localhost/old-python:1"
_ABOUT = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.prefix, sys.base_prefix]))"


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="ACCELMARK_OLD_PYTHON names no Python with PyTorch")
@pytest.mark.parametrize("is_contained", [False, True], ids=["hosts", "container"])
def test_agents_and_ranks_run_on_the_python_of_hosts_and_containers(
    cluster: Callable[..., ClusterSpec], bed: Bed, plugins: Path, tmp_path: Path, is_contained: bool
) -> None:
    case = plugins / "cases" / "tiny"
    case.mkdir()
    (case / "case.yaml").write_text(CASE.replace("sleep_ms: 0", "sleep_ms: 20"))  # long enough to be VALID
    shutil.copy(TINY, case / "pytorch.py")
    about = subprocess.run([PYTHON, "-c", _ABOUT], capture_output=True, text=True, check=True).stdout
    major, minor, *prefixes = json.loads(about)
    values: dict[str, object] = {"python": PYTHON}
    if is_contained:
        write_rootfs(tmp_path / "rootfs.tar")
        (tmp_path / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        podman(bed, "build", "--tag", IMAGE, str(tmp_path))
        mounts = [f"{path}:{path}:ro" for path in ("/usr", *prefixes)]
        values["container"] = {"engine": "podman", "image": IMAGE, "mounts": mounts, "python": PYTHON}
    num_hosts = 1 if is_contained else 2
    run = tmp_path / "run"
    file = run_file(tmp_path, cluster(num_hosts, **values), f"tiny:pytorch:CPU:{num_hosts}:1:1", vendor="cpu")
    ended = accelmark("run", str(file), "--set", "threads=1", "--out", str(run), "--json")
    said = ended.stdout + ended.stderr + "".join(log.read_text() for log in run.rglob("*.log"))
    assert status_of(run)[0].state == "succeeded", said
    (round_dir,) = run.glob("*/round1")
    found = read_reevaluation(round_dir)
    assert found is not None, said
    assert found.problem is None, said
    (agent,) = {json.loads(path.read_text())["python"] for path in round_dir.glob("n*/sys_info.json")}
    assert agent.startswith(f"{major}.{minor}."), agent
    (summary,) = json.loads((run / "summary.json").read_text())["cases"]
    assert summary["verdict"] == "VALID", summary["findings"]
