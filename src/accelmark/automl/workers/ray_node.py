"""Program on a host of a Ray cluster: runs Ray as its child until its standard input closes.

The first line of input is a JSON object: role (head or node), address, token; for the head also port and folder. The
line ``up`` is printed when Ray runs.
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
from typing import IO, Final

import psutil

_UP_S: Final = 90.0
_END_S: Final = 10.0
_RUNNING: Final = "Ray runtime started"


def _command(request: Mapping[str, object]) -> list[str]:
    base = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if request["role"] == "node":
        return [*base, f"--address={request['address']}"]
    address = [
        f"--node-ip-address={request['address']}",
        f"--port={request['port']}",
        f"--temp-dir={request['folder']}",
    ]
    return [*base, "--head", *address, "--include-dashboard=false", "--num-cpus=0", "--num-gpus=0"]


def main() -> int:
    """Start Ray, print when it runs, end it when the input closes; return an exit code."""
    request = json.loads(sys.stdin.readline())
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": str(request["token"])}
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    process = subprocess.Popen(
        _command(request), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    descendants: list[psutil.Process] = []
    try:
        last = _last_line_before_start(process.stdout or ())
        if process.poll() is not None or _RUNNING not in last:
            print(last or "Ray ended without output", file=sys.stderr)
            return 1
        descendants = psutil.Process(process.pid).children(recursive=True)
        threading.Thread(
            target=lambda: [None for _ in process.stdout or ()], daemon=True
        ).start()  # keeps the pipe empty
        print("up", flush=True)
        with contextlib.suppress(ValueError, OSError):
            sys.stdin.read()
        return 0
    finally:
        _end(process, descendants)
        if request["role"] == "head":
            shutil.rmtree(str(request["folder"]), ignore_errors=True)


def _last_line_before_start(output: IO[str] | tuple[str, ...]) -> str:
    """Read Ray's output until it runs, ends or takes too long; return the last line that is not empty."""
    last, deadline = "", time.monotonic() + _UP_S
    for line in output:
        last = line.strip() or last
        if _RUNNING in line or time.monotonic() > deadline:
            break
    return last


def _end(process: subprocess.Popen[str], descendants: list[psutil.Process]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = [*descendants, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for one in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(descendants, timeout=_END_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
