"""A dockerd in the namespaces of one of the bed's hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from tests.cluster.bed import Bed


@contextlib.contextmanager
def dockerd(bed: Bed, number: int) -> Iterator[str]:
    """Run a dockerd on one host of the bed; gives the address that its client finds it at."""
    home = bed.home(number) / "docker"
    home.mkdir(exist_ok=True)  # of an earlier engine on this host
    address = f"unix://{home}/docker.sock"
    command = [
        "dockerd", "--data-root", str(home / "data"), "--exec-root", str(home / "exec"), "-H", address,
        "-p", str(home / "pid"), "--storage-driver", "overlay2", "--bridge=none", "--iptables=false",
        "--ip6tables=false", "--ip-forward=false",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(bed.inside(number, *command), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while subprocess.run(["docker", "-H", address, "info"], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("dockerd does not start: " + (home / "log").read_text()[-2000:])
            time.sleep(0.2)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
