"""Plan a run on many hosts, and read the state of a running one, without a connection to any of them."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelmark.cli.runs import plan_request
from accelmark.plan.plan import Plan
from accelmark.run.display.summary import print_status, read_status
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.runfile import RunSpec
from benchmarks.fanout.simulated import STEP


def bookkeeping(numbers: list[int], num_ranks: int, num_steps: int) -> list[dict[str, Any]]:
    """Return the times for each number of hosts, of a job that has written ``num_steps`` lines per rank."""
    return [_row(number, num_ranks, num_steps) for number in numbers]


def _row(num_hosts: int, num_ranks: int, num_steps: int) -> dict[str, Any]:
    hosts = [
        {"address": f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}", "label": f"h{index}"}
        for index in range(num_hosts)
    ]
    request = RunSpec.model_validate(
        {
            "name": "many",
            "vendor": "cpu",
            "open": True,
            "cluster": {"name": "many", "launcher": "ssh", "vendor": "cpu", "hosts": hosts},
            "cases": [f"resnet_mini:pytorch:CPU:{num_hosts}:{num_ranks}:1"],
        }
    )
    plans: list[Plan] = []
    with tempfile.TemporaryDirectory() as directory:
        plan_s = _seconds(lambda: plans.append(plan_request(request, [], synthetic=True)))
        plan = plans[-1]
        run = RunDirectory.create(Path(directory) / "run", plan)
        (job,) = plan.jobs
        events = run.event_log()
        for state in ("preparing", "running"):
            events.move(job.directory, state)
        events.close()
        for index, node in enumerate(job.nodes):
            path = run.node_dir(job, node)
            path.mkdir(parents=True)
            for rank in range(num_ranks):
                (path / f"rank{index * num_ranks + rank}.out.log").write_bytes(STEP * num_steps)
        show_s = _seconds(lambda: print_status(read_status(run.path)))
        command_s, cpu_s = min(_command(run.path) for _ in range(3))
        plan_bytes = (run.path / "plan.json").stat().st_size
    row = {"hosts": num_hosts, "plan_s": plan_s, "plan_bytes": plan_bytes, "status_s": show_s}
    row |= {"command_s": command_s, "command_cpu_s": cpu_s}
    print(row, file=sys.stderr, flush=True)
    return row


def _command(run: Path) -> tuple[float, float]:
    """Return duration and processor time of ``accelmark status``, with Python's start and imports."""
    begun, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-m", "accelmark", "status", str(run)], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begun, cpu_s


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest of three times."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            call()
        times.append(time.monotonic() - begun)
    return min(times)
