"""Start, stop and query a telemetry recorder in the background, without a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from accelmark.spec.errors import RequestError, RunError, raising
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.telemetry.forms import telemetry_of
from accelmark.telemetry.inventory import default_vendor
from accelmark.telemetry.record import CONFIG_FILE, RECORD_FILE

PID_FILE: Final = "monitor.json"
_ERRORS: Final = "monitor.err"
_STOP_TIMEOUT_S: Final = 15.0


class MonitorStatus(NamedTuple):
    """Whether a monitor is writing to a directory."""

    running: bool
    pid: int | None = None
    vendor: str | None = None
    num_samples: int | None = None
    problem: str | None = None


def check_vendor(vendor: str) -> Path:
    """Return the folder of a vendor; raises RequestError if it is unknown or its ``vendor.yaml`` is invalid."""
    folder = find("vendors", vendor, "--vendor").path
    telemetry_of(load_vendor(vendor), str(folder / "vendor.yaml"))
    return folder


def start(vendor: str, log_path: Path, interval_s: float = 1.0) -> MonitorStatus:
    """Start a monitor that outlives this process; keeps an earlier record. Raises RunError with its error output."""
    folder = check_vendor(vendor)
    now = status(log_path)
    if now.running:
        raise RequestError(f"a monitor (process {now.pid}) is already writing to {log_path}; use stop or restart")
    config = {"vendor": vendor, "vendor_folder": str(folder), "interval_s": interval_s, "detached": True}
    with raising(RunError, f"{log_path} is not writable", OSError):
        log_path.mkdir(parents=True, exist_ok=True)
        record = log_path / RECORD_FILE
        if record.exists():  # clocks and devices may have changed since
            ended = datetime.fromtimestamp(record.stat().st_mtime, timezone.utc)
            record.rename(record.with_name(f"{record.stem}-{ended:%Y%m%dT%H%M%S.%fZ}{record.suffix}"))
        (log_path / _ERRORS).unlink(missing_ok=True)
        process = _spawn(log_path, config, log_path / _ERRORS)
        entry = {"pid": process.pid, "started": _start_time(process.pid), "vendor": vendor}
        (log_path / PID_FILE).write_text(json.dumps(entry) + "\n")
    if not _await_first_sample(log_path, process):
        process.kill()
        process.wait()
        errors = (log_path / _ERRORS).read_text(errors="replace").strip() or "no error output"
        (log_path / PID_FILE).unlink(missing_ok=True)
        raise RunError(f"the monitor did not start: {errors}")
    process.returncode = 0  # it continues after this process: the destructor of the handle must not warn
    return status(log_path)


@contextmanager
def recording(log_path: Path) -> Iterator[None]:
    """Record telemetry of this machine and process in the context; a recorder that fails does not fail it."""
    log_path.mkdir(parents=True, exist_ok=True)
    vendor = default_vendor()
    config = {"vendor": vendor, "vendor_folder": str(find("vendors", vendor).path), "pids": [os.getpid()]}
    recorder = _spawn(log_path, config, log_path / "telemetry.log")
    try:
        _await_first_sample(log_path, recorder)
        yield
    finally:
        recorder.terminate()
        with suppress(subprocess.TimeoutExpired):
            recorder.wait(_STOP_TIMEOUT_S)
        recorder.kill()
        recorder.wait()


def _spawn(log_path: Path, config: Mapping[str, object], output: Path) -> subprocess.Popen[bytes]:
    (log_path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "accelmark.telemetry.record", str(log_path)]
    detached = bool(config.get("detached"))
    with output.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=detached
        )


def _await_first_sample(log_path: Path, recorder: subprocess.Popen[bytes]) -> bool:
    """Wait until a recorder has written a sample; returns whether it has."""
    deadline = time.monotonic() + 20
    while not _num_samples(log_path) and recorder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return _num_samples(log_path) > 0


def stop(log_path: Path) -> bool:
    """Stop the monitor that writes to ``log_path``; returns whether there was one, raises RunError if it continues."""
    now = status(log_path)
    if not now.running or now.pid is None:
        (log_path / PID_FILE).unlink(missing_ok=True)
        return False
    os.kill(now.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while status(log_path).running:
        if time.monotonic() > deadline:
            problem = f"the monitor (process {now.pid}) did not stop within {_STOP_TIMEOUT_S:g} s"
            raise RunError(f"{problem}; use kill -9 {now.pid}")
        time.sleep(0.05)
    (log_path / PID_FILE).unlink(missing_ok=True)
    return True


def status(log_path: Path) -> MonitorStatus:
    """Return whether a monitor is writing to ``log_path``."""
    try:
        entry = json.loads((log_path / PID_FILE).read_text())
        pid, started, vendor = int(entry["pid"]), entry["started"], str(entry["vendor"])
    except (OSError, ValueError, KeyError, TypeError):
        return MonitorStatus(False)
    # A process id is reused; together with the start time it is unique.
    running = started is not None and _start_time(pid) == started
    problem: object = None
    if running:
        with suppress(OSError, ValueError, KeyError), (log_path / RECORD_FILE).open("rb") as file:
            problem = json.loads(file.readline())["header"]["reasons"].get("devices")
    samples = _num_samples(log_path)
    return MonitorStatus(running, pid if running else None, vendor, samples, None if problem is None else str(problem))


def _start_time(pid: int) -> float | None:
    """Return the start of a process in Unix time; None where it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    return None


def _num_samples(log_path: Path) -> int:
    with suppress(OSError), (log_path / RECORD_FILE).open("rb") as file:
        return sum(line.startswith(b'{"t"') for line in file)
    return 0
