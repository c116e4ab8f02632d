"""Start the real recorder process with a made-up vendor, whose tool is a script (mock: there is no such chip)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from accelmark.results.read.telemetry import Samples, read_samples

SRC = Path(__file__).parents[2] / "src"

TOOL = """#!/bin/sh
# Mock of a vendor's tool.
echo 'ID Temp Power Used Total Util'
echo "0 31C 57W 15MiB 40536MiB 0%"
echo "1 32C 58W 16MiB 40536MiB 7%"
"""

VENDOR = """
name: acme
title: Acme (made up for tests)
frameworks:
  pytorch: {{device_type: cpu, collective_backend: gloo}}
visible_devices_env: null
chips: []
telemetry:
  tool:
    command: [{tool}]
    timeout_s: {timeout_s}
    forms:
      - source: made up for tests, after FlagPerf's log line for NVIDIA
        header: ['ID Temp Power Used Total Util']
        rows:
          - >-
            (?P<index>\\d+) (?P<temperature_c>\\S+) (?P<power_w>\\S+) (?P<memory_used_mib>\\S+)
            (?P<memory_total_mib>\\S+) (?P<utilisation>\\S+)
"""


FLAGPERF_SCRIPT = """
# Mock of a FlagPerf monitor script: its arguments, its daemon, its pid file, its log and its line format.
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("-o")
parser.add_argument("-l", default="./logs/")
args = parser.parse_args()
pid_file = {pid_file!r}
log = args.l + "/acme_monitor.log"
if args.o == "restart":
    if os.path.exists(pid_file):
        os.remove(pid_file)
    args.o = "start"
if args.o == "start":
    if os.path.exists(pid_file):
        sys.exit(1)
    if os.fork():
        sys.exit(0)
    os.setsid()
    if os.fork():
        sys.exit(0)
    with open(os.devnull, "r+") as null:
        for fd in (0, 1, 2):
            os.dup2(null.fileno(), fd)
    open(pid_file, "w").write(str(os.getpid()))
    while True:
        with open(log, "a") as file:
            file.write(time.strftime("%Y-%m-%d-%H:%M:%S") + "\\n40C 114W 28653MiB 32768MiB 94%\\n")
            file.write("34C 74W 0MiB 32768MiB 0%\\n\\n")
        time.sleep({pace_s})
elif args.o == "stop":
    os.kill(int(open(pid_file).read()), signal.SIGTERM)
    os.remove(pid_file)
"""


def make_vendor(root: Path, tool: str = TOOL, timeout_s: float = 5.0) -> tuple[Path, Path]:
    """Make a vendor's folder whose tool is ``tool``; return the folder and the tool."""
    folder = root / "acme"
    folder.mkdir(parents=True)
    script = root / "acme-smi"
    write_tool(script, tool)
    (folder / "vendor.yaml").write_text(VENDOR.format(tool=json.dumps(str(script)), timeout_s=timeout_s))
    return folder, script


def write_tool(path: Path, text: str) -> None:
    """Write a tool atomically, so that it is never run half written."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.chmod(0o755)
    part.replace(path)


def start(node_dir: Path, folder: Path, **more: object) -> subprocess.Popen[str]:
    """Start the recorder as the agent does."""
    config = {"vendor": folder.name, "vendor_folder": str(folder), "interval_s": 0.1, "pids": [os.getpid()], **more}
    (node_dir / "telemetry.json").write_text(json.dumps(config))
    command, environment = [sys.executable, "-m", "accelmark.telemetry.record"], os.environ | {"PYTHONPATH": str(SRC)}
    return subprocess.Popen([*command, str(node_dir)], env=environment, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool], patience_s: float = 300.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def num_lines(node_dir: Path, having: str = '"t"') -> int:
    path = node_dir / "telemetry.jsonl"
    return sum(having in line for line in path.read_text().splitlines()) if path.exists() else 0


def stop(process: subprocess.Popen[str], node_dir: Path) -> Samples:
    """Stop the recorder as the agent does, and read its record."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    if process.stderr is not None:
        process.stderr.close()
    return read_samples(node_dir / "telemetry.jsonl")


def recorded(node_dir: Path, folder: Path, num: int, having: str = '"t"', **more: object) -> Samples:
    """Record until so many lines of the record contain a text."""
    process = start(node_dir, folder, **more)
    until(lambda: num_lines(node_dir, having) >= num)
    return stop(process, node_dir)
