"""Hosts and containers with an older Python than the coordinator's; `make test-versions` sets ACCELMARK_OLD_PYTHON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.results.read.round_dir import read_reevaluation
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.cluster.boxed import podman, write_rootfs
from tests.cluster.conftest import statuses
from tests.cluster.test_containers import CASE, accelmark, run_file, write_tiny

PYTHON = os.environ.get("ACCELMARK_OLD_PYTHON", "")
IMAGE = "localhost/old-python:1"
_ABOUT = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.prefix, sys.base_prefix]))"
_PACKAGES = "/opt/packages"
_DEBIAN_11 = f"""\
FROM scratch
ADD rootfs.tar /
RUN echo {_PACKAGES} > /usr/lib/python3/dist-packages/vendor.pth && python3 -m compileall -q /usr/lib/python3.9
"""
"""Like a vendor's image: a Linux distribution's Python, and PyTorch in a directory of its own."""


def write_debian_11(path: Path) -> None:
    """Write the root file system of Debian 11 with its Python 3.9, from Debian's archive."""
    if shutil.which("debootstrap") is None:
        pytest.skip("needs debootstrap")
    packages = "--include=python3,python3-distutils,libgomp1,procps"
    command = ["debootstrap", "--variant=minbase", packages, "bullseye", str(path.with_suffix(""))]
    made = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.splitlines()[-1]}")  # Debian's archive cannot be reached
    subprocess.run(["tar", "-cf", path, "-C", path.with_suffix(""), "--exclude=./dev/*", "."], check=True)


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="ACCELMARK_OLD_PYTHON names no Python with PyTorch")
@pytest.mark.parametrize("place", ["hosts", "container", "Debian 11"])
def test_agents_and_ranks_run_on_the_python_of_hosts_and_containers(
    cluster: Callable[..., ClusterSpec], bed: Bed, plugins: Path, run: Path, tmp_path: Path, place: str
) -> None:
    write_tiny(plugins, CASE.replace("sleep_ms: 0", "sleep_ms: 20"))  # long enough to be VALID
    about = subprocess.run([PYTHON, "-c", _ABOUT], capture_output=True, text=True, check=True).stdout
    major, minor, *prefixes = json.loads(about)
    values: dict[str, object] = {"python": PYTHON}
    if place == "container":
        write_rootfs(tmp_path / "rootfs.tar")
        (tmp_path / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        mounts = [f"{path}:{path}:ro" for path in ("/usr", *prefixes)]
        values["container"] = {"engine": "podman", "image": IMAGE, "mounts": mounts, "python": PYTHON}
    elif place == "Debian 11":
        if minor != 9:
            pytest.skip("Debian 11 has Python 3.9")
        write_debian_11(tmp_path / "rootfs.tar")
        (tmp_path / "Dockerfile").write_text(_DEBIAN_11)
        mounts = [f"{prefixes[0]}/lib/python3.9/site-packages:{_PACKAGES}:ro"]
        values["container"] = {"engine": "podman", "image": IMAGE, "mounts": mounts, "python": "/usr/bin/python3"}
    if "container" in values:
        podman(bed, "build", "--tag", IMAGE, "--network", "host", str(tmp_path))
    num_hosts = 2 if place == "hosts" else 1
    file = run_file(tmp_path, cluster(num_hosts, **values), f"tiny:pytorch:CPU:{num_hosts}:1:1", vendor="cpu")
    ended = accelmark("run", str(file), "--set", "threads=1", "--out", str(run), "--json")
    said = ended.stdout + ended.stderr + "".join(log.read_text() for log in run.rglob("*.log"))
    assert statuses(run)[0].state == "succeeded", said
    (round_dir,) = run.glob("*/round1")
    found = read_reevaluation(round_dir)
    assert found is not None, said
    assert found.problem is None, said
    (agent,) = {json.loads(path.read_text())["python"] for path in round_dir.glob("n*/sys_info.json")}
    assert agent.startswith(f"{major}.{minor}."), agent
    (summary,) = json.loads((run / "summary.json").read_text())["cases"]
    assert summary["verdict"] == "VALID", summary["findings"]
