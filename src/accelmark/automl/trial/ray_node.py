"""Program on a host of a Ray cluster: runs Ray as its child until its standard input closes.

The first line of input is JSON: role (head or node), address, token, version of Ray; for the head also port, folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

import psutil

_UP_S: Final = 90.0
_END_S: Final = 10.0
_RUNNING: Final = "Ray runtime started"


def main() -> int:
    """Start Ray, print when it runs, end it when the input closes; return an exit code."""
    request = json.loads(sys.stdin.readline())
    if (version := importlib.metadata.version("ray")) != request["ray"]:
        print(f"Ray {version} is installed; the search uses {request['ray']}: install that version", file=sys.stderr)
        return 1
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": str(request["token"])}
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if request["role"] == "node":
        command += [f"--address={request['address']}"]
    else:
        options = {"node-ip-address": request["address"], "port": request["port"], "temp-dir": request["folder"]}
        options |= {"include-dashboard": "false", "num-cpus": 0, "num-gpus": 0}
        command += ["--head", *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    last, deadline = "", time.monotonic() + _UP_S
    descendants: list[psutil.Process] = []
    try:
        for line in process.stdout or ():
            last = line.strip() or last
            if _RUNNING in line or time.monotonic() > deadline:
                break
        if process.poll() is not None or _RUNNING not in last:
            print(last or "Ray ended without output", file=sys.stderr)
            return 1
        descendants = psutil.Process(process.pid).children(recursive=True)
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()  # keeps the pipe empty
        print("up", flush=True)
        with suppress(ValueError, OSError):
            sys.stdin.read()
        return 0
    finally:
        with suppress(psutil.NoSuchProcess):
            descendants += psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # Ray ends its processes then
        for one in psutil.wait_procs(descendants, _END_S)[1]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait()
        if request["role"] == "head":
            shutil.rmtree(str(request["folder"]), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
