"""Runs on a host of the cluster: Ray as its child, for as long as its standard input stays open.

The first line of input is a JSON object: role (head or node), address, token, and for the head port and folder.
When Ray is up, ``up`` is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final

import psutil

_UP_S: Final = 90.0
_END_S: Final = 10.0


def ray_command(request: Mapping[str, object]) -> list[str]:
    """Return the argument list that starts Ray as this host's part."""
    base = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if request["role"] == "head":
        return [
            *base,
            "--head",
            f"--node-ip-address={request['address']}",
            f"--port={request['port']}",
            f"--temp-dir={request['folder']}",
            "--include-dashboard=false",
            "--num-cpus=0",
            "--num-gpus=0",
        ]
    return [*base, f"--address={request['address']}"]


def main() -> int:
    """Start Ray, say when it is up, end it when the input closes; return an exit status."""
    request = json.loads(sys.stdin.readline())
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": str(request["token"])}
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    process = subprocess.Popen(
        ray_command(request), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    family: list[psutil.Process] = []
    try:
        said = _said_until_up(process)
        if process.poll() is not None or said is not None:
            print(said or "Ray ended at once", file=sys.stderr)
            return 1
        family = psutil.Process(process.pid).children(recursive=True)
        threading.Thread(target=_drain, args=(process,), daemon=True).start()
        print("up", flush=True)
        with contextlib.suppress(ValueError, OSError):
            sys.stdin.read()
        return 0
    finally:
        _end(process, family)
        if request["role"] == "head":
            shutil.rmtree(str(request["folder"]), ignore_errors=True)


def _said_until_up(process: subprocess.Popen[str]) -> str | None:
    """Read Ray's output until it says that it runs; return its last words when it does not."""
    last = ""
    deadline = time.monotonic() + _UP_S
    if process.stdout is None:
        return "no output"
    for line in process.stdout:
        last = line.strip() or last
        if "Ray runtime started" in line:
            return None
        if time.monotonic() > deadline:
            break
    return last


def _drain(process: subprocess.Popen[str]) -> None:
    """Read what Ray goes on saying, so that its pipe never fills up."""
    if process.stdout is not None:
        for _ in process.stdout:
            pass


def _end(process: subprocess.Popen[str], family: list[psutil.Process]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*family, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=_END_S)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
