"""What runs beside training, and how much of a core it takes: telemetry, node agent, coordinator with display.

Run ``python benchmarks/companions.py`` (``--seconds 30``): starts ``accelmark train resnet_mini`` on made-up data, on a
terminal so that the live display draws, waits until it trains, and reads each process's CPU time over a while.
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from accelmark.spec.events import PERFLOG_PREFIX

START_S: Final = 120.0


def started(runs: Path, program: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the run on a terminal of its own, which somebody reads."""
    ours, theirs = pty.openpty()
    settings = [
        "--set",
        "end.max_epochs=1000",
        "--set",
        "log_every_steps=20",
        "--set",
        "threads=1",
        "--synthetic",
        "--open",
    ]
    command = [*program, "train", "resnet_mini", *settings, "--out", str(runs / "run")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)

    def read() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:
            return

    threading.Thread(target=read, daemon=True).start()
    return process, ours


def wait_for_training(runs: Path) -> None:
    """Return once the first window is written.

    Raises:
        TimeoutError: there was none.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for log in runs.rglob("rank0.out.log"):
            if f'{PERFLOG_PREFIX}{{"event": "STEP_END"' in log.read_text(encoding="utf-8", errors="replace"):
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing trained within {START_S:g} s; see {runs}")


def name_of(process: psutil.Process) -> str:
    """Say what a process of the run is."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else "coordinator and display"
    return {"accelmark.telemetry.record": "telemetry recorder", "accelmark.train": "training itself"}.get(
        module, module
    )


def shares(root: psutil.Process, seconds: float) -> dict[str, float]:
    """Return the share of a core that each process of the run takes."""
    processes = [root, *root.children(recursive=True)]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    begun = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - begun
    found: dict[str, float] = {}
    for process, earlier in zip(processes, before, strict=True):
        name = name_of(process)
        found[name] = found.get(name, 0.0) + (sum(process.cpu_times()[:2]) - earlier) / passed
    return found


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    program = [sys.executable, "-c", "from accelmark.cli import main; main()"]
    with tempfile.TemporaryDirectory() as name:
        process, terminal = started(Path(name), program)
        try:
            wait_for_training(Path(name))
            time.sleep(2)
            found = shares(psutil.Process(process.pid), options.seconds)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            os.close(terminal)
    print("| Process | Share of a core |\n|---|---:|")
    for what, share in sorted(found.items(), key=lambda item: -item[1]):
        print(f"| {what} | {share:.2%} |")


if __name__ == "__main__":
    main()
