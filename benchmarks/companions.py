"""Measure the cost of the processes beside training: telemetry recorder, node agent, coordinator with display.

Run ``python -m benchmarks.companions`` (``--seconds 30``). It starts ``accelmark train resnet_mini`` on synthetic data,
in a pseudo-terminal so that the live display is drawn, and measures the CPU time of each process once training runs.

``--pauses 60 --threads 2`` then stops (SIGSTOP) and continues these processes for a few seconds each, in pairs of
random order, and compares the step times of training with and without them.

``--checked`` trains on the case's data, as users do, and reports what the checkpoints between which steps are replayed
cost inside training: the time of writing them, and by how much the median of the steps after one differs from the
median step.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from accelmark.spec.log.perflog import PERFLOG_PREFIX
from benchmarks.turns import Cost

START_S: Final = 120.0
PAUSE_S: Final = 4.0
TRAINING: Final = "training itself"
AFTER: Final = 20
"""Steps after a checkpoint that are compared with the median step."""


def started(
    runs: Path, program: list[str], model: str, threads: int, *, checked: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the run in a pseudo-terminal whose output is read."""
    ours, theirs = pty.openpty()
    settings = [
        "--set",
        "end.max_epochs=1000",
        "--set",
        "log_every_steps=20",
        "--set",
        f"threads={threads}",
        *(() if checked else ("--synthetic",)),
        "--open",
    ]
    command = [*program, "train", model, *settings, "--out", str(runs / "run")]
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
    """Wait until the first window is written.

    Raises:
        TimeoutError: none was written in time.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for log in runs.rglob("rank0.out.log"):
            if f'{PERFLOG_PREFIX}{{"event": "STEP_END"' in log.read_text(encoding="utf-8", errors="replace"):
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing trained within {START_S:g} s; see {runs}")


def name_of(process: psutil.Process) -> str:
    """Return the name of a process of the run for the table."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else "coordinator and display"
    return {"accelmark.telemetry.record": "telemetry recorder", "accelmark.train.loop.rank": TRAINING}.get(
        module, module
    )


def shares(root: psutil.Process, seconds: float) -> dict[str, float]:
    """Return the share of a core that each process of the run uses."""
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


def paused(root: psutil.Process, pairs: int) -> list[tuple[int, bool, float, float]]:
    """Stop and continue the processes beside training; return (pair, stopped, begin, end) of each span."""
    beside = [one for one in (root, *root.children(recursive=True)) if name_of(one) != TRAINING]
    chance = random.Random(1)
    spans = []
    try:
        for pair in range(pairs):
            for held in chance.sample((True, False), 2):
                for process in beside:
                    process.send_signal(signal.SIGSTOP if held else signal.SIGCONT)
                begun = time.monotonic()
                time.sleep(PAUSE_S)
                spans.append((pair, held, begun, time.monotonic()))
    finally:
        for process in beside:
            process.send_signal(signal.SIGCONT)
    return spans


def cost(runs: Path, spans: list[tuple[int, bool, float, float]]) -> Cost:
    """Compare the step times of the windows inside the spans."""
    (log,) = runs.rglob("rank0.out.log")
    windows = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(PERFLOG_PREFIX) and '"STEP_END"' in line:
            record = json.loads(line.removeprefix(PERFLOG_PREFIX))
            closed_s, value = record["metadata"]["mono_ms"] / 1e3, record["value"]
            windows.append((closed_s - value["wall_ms"] / 1e3, closed_s, value["wall_ms"], len(value["step_ms"])))
    step_us: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for pair, held, begun, ended in spans:
        within = [(wall_ms, steps) for opened, closed, wall_ms, steps in windows if begun <= opened and closed <= ended]
        step_us[held][pair] = 1e3 * sum(wall for wall, _ in within) / sum(steps for _, steps in within)
    return Cost.of(step_us[True], step_us[False])


def checkpoints(runs: Path) -> str:
    """Return what the checkpoints cost, from the events of the rank."""
    (log,) = runs.rglob("rank0.out.log")
    written_s: list[float] = []
    step_ms: list[float] = []
    after_ms: list[float] = []
    training_s = 0.0
    left = 0
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith(PERFLOG_PREFIX):
            continue
        record = json.loads(line.removeprefix(PERFLOG_PREFIX))
        if record["event"] == "CHECKPOINT":
            written_s.append(record["value"]["duration_s"])
            left = AFTER
        elif record["event"] == "STEP_END":
            training_s += record["value"]["wall_ms"] / 1e3
            step_ms += record["value"]["step_ms"]
            after_ms += record["value"]["step_ms"][:left]
            left -= min(left, len(record["value"]["step_ms"]))
    median_ms = statistics.median(step_ms)
    slower_s = len(after_ms) * (statistics.median(after_ms) - median_ms) / 1e3  # means would show other load
    after = f"the median of the {len(after_ms)} steps after them is {statistics.median(after_ms):.2f} ms"
    return (
        f"{len(written_s)} checkpoints in {training_s:.1f} s of training ({len(step_ms)} steps, median "
        f"{median_ms:.2f} ms): {1e3 * statistics.median(written_s):.1f} ms each, {sum(written_s) / training_s:.2%} of "
        f"training; {after}, which adds {slower_s / training_s:+.2%}"
    )


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", default="resnet_mini")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pauses", type=int, default=0, help=f"pairs of {PAUSE_S:g} s held and {PAUSE_S:g} s not")
    parser.add_argument("--checked", action="store_true", help="the case's data; also the cost of checkpoints")
    options = parser.parse_args()
    program = [sys.executable, "-c", "from accelmark.cli import main; main()"]
    with tempfile.TemporaryDirectory() as name:
        process, terminal = started(Path(name), program, options.model, options.threads, checked=options.checked)
        try:
            wait_for_training(Path(name))
            time.sleep(2)
            found = shares(psutil.Process(process.pid), options.seconds)
            spans = paused(psutil.Process(process.pid), options.pauses)
            beside = cost(Path(name), spans) if spans else None
            written = checkpoints(Path(name)) if options.checked else ""
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            os.close(terminal)
    print("| Process | Share of a core |\n|---|---:|")
    for what, share in sorted(found.items(), key=lambda item: -item[1]):
        print(f"| {what} | {share:.2%} |")
    if written:
        print(f"\n{written}.")
    if beside is not None:
        (low_us, high_us), (low, high) = beside.extra_us_interval, beside.relative_interval
        print(
            f"\nWith all of them a step takes {beside.step_us:,.0f} us, {beside.extra_us:+,.1f} us more than while they"
            f" are held (95 %: {low_us:+,.1f} to {high_us:+,.1f}), {beside.relative:+.2%} ({low:+.2%} to {high:+.2%})."
        )


if __name__ == "__main__":
    main()
