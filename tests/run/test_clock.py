"""A wall clock that steps back while a real agent, recorder and rank run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from accelmark.run.agent.task import AgentTask, TelemetryTask
from accelmark.run.processes import NODE_MARKER, RUN_MARKER
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.catalog import find
from tests.run.fakes import wait_for

SHIFTED = """
import os, pathlib, time
_offset, _time, _time_ns = pathlib.Path(os.environ["CLOCK_OFFSET_FILE"]), time.time, time.time_ns
time.time = lambda: _time() + float(_offset.read_text())
time.time_ns = lambda: _time_ns() + int(float(_offset.read_text()) * 1e9)
"""
"""Run by every Python at its start: shifts the wall clock by the value in a file."""


def test_a_clock_that_steps_back_changes_no_duration_and_no_end(
    make_task: Callable[..., AgentTask], tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SHIFTED)
    task = make_task("steps=40", "pace=0.1", timeout_s=120.0)
    where = task.job_file.parent / "here_noderank0"
    recorder = TelemetryTask(vendor="cpu", vendor_folder=find("vendors", "cpu").path, interval_s=0.2)
    (where / "agent.json").write_text(task.model_copy(update={"telemetry": recorder}).model_dump_json())
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shifted = {"PYTHONPATH": path, "CLOCK_OFFSET_FILE": str(clock)}
    began = time.monotonic()
    agent = subprocess.Popen(
        [sys.executable, "-m", "accelmark.run.agent.agent", str(where)],
        env=os.environ | shifted | {RUN_MARKER: task.run, NODE_MARKER: str(where)},
        start_new_session=True,
    )
    log = where / "rank0.out.log"
    wait_for(lambda: log.exists() and "STEP_END" in log.read_text(), "the first step")
    clock.write_text("-7200")
    agent.wait(60)
    took = time.monotonic() - began
    end = NodeExit.model_validate_json((where / "exit.json").read_bytes())
    assert (end.state, end.reason) == ("succeeded", None)
    assert 0 < end.duration_s <= took
    lines = [line for line in log.read_text().splitlines() if line.startswith("[PerfLog]")]
    stamps = [json.loads(line.removeprefix("[PerfLog] "))["metadata"]["time_ms"] for line in lines]
    assert min(after - before for before, after in pairwise(stamps)) < -3_600_000, "it stepped back"
    samples = [json.loads(line) for line in (where / "telemetry.jsonl").read_text().splitlines()]
    monotonic = [sample["t"] for sample in samples if "t" in sample]
    assert monotonic == sorted(monotonic)
    assert len(monotonic) >= 2
