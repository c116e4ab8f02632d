"""Measure the cost of telemetry: CPU time of the recorder, in total and for each part of a sample.

Run ``python -m benchmarks.telemetry_cost [--seconds 30] [--json FILE]``. The heading of ``telemetry_cost.md`` states
date and machine of its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from accelmark.results.read.telemetry import read_samples
from accelmark.spec.plugins.catalog import find
from accelmark.telemetry.forms import read_vendor
from accelmark.telemetry.host import HostSampler, cpu_model
from accelmark.telemetry.inventory import default_vendor, detect
from accelmark.telemetry.sources import device_sources

ROUNDS = 200


def cpu_ms(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the mean CPU time of a call in ms."""
    call()
    begun = time.process_time()
    for _ in range(rounds):
        call()
    return (time.process_time() - begun) / rounds * 1000


def recorder(vendor: str, interval_s: float, seconds: float) -> dict[str, float]:
    """Run the recorder; return its CPU time without start-up as a share of one core."""
    with tempfile.TemporaryDirectory() as name:
        node_dir = Path(name)
        config = {"vendor": vendor, "vendor_folder": str(find("vendors", vendor).path), "interval_s": interval_s,
                  "pids": [os.getpid()]}  # fmt: skip
        (node_dir / "telemetry.json").write_text(json.dumps(config))
        with subprocess.Popen([sys.executable, "-m", "accelmark.telemetry.record", name]) as process:
            record = node_dir / "telemetry.jsonl"
            while not record.exists() or not record.stat().st_size:
                time.sleep(0.01)
            begun, started = _cpu_s(process.pid), time.monotonic()
            time.sleep(seconds)
            used, passed = _cpu_s(process.pid) - begun, time.monotonic() - started
            rss = _rss_mib(process.pid)
            process.send_signal(signal.SIGTERM)
        footer = read_samples(record).footer or {}
    return {
        "interval_s": interval_s, "share_of_a_core": used / passed, "start_up_cpu_s": begun, "rss_mib": rss,
        "samples": footer["samples"], "missed": footer["missed"],
        "cpu_ms_per_sample": used / passed * interval_s * 1000,
    }  # fmt: skip


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vendor = default_vendor()
    folder = find("vendors", vendor).path
    (source, *_) = device_sources(folder, read_vendor(folder)[1])
    source.open()
    host = HostSampler([os.getpid()])
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "vendor": vendor,
        "host_sample_ms": cpu_ms(lambda: host.sample(time.monotonic())),
        "device_sample_ms": cpu_ms(source.sample),
        "detect_without_reading_ms": cpu_ms(lambda: detect(read=False), 20),
        "recorder": [recorder(vendor, interval, arguments.seconds) for interval in (1.0, 0.1)],
    }
    source.close()
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
