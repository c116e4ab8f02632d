"""The recorder by itself, in the background, as FlagPerf's monitor scripts are used: start, stop, status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

from accelmark.spec.catalog import find, load_vendor
from accelmark.spec.errors import RequestError, RunError
from accelmark.telemetry.record import CONFIG_FILE, RECORD_FILE
from accelmark.telemetry.source import telemetry_of

PID_FILE: Final = "monitor.json"
_ERRORS: Final = "monitor.err"
_START_PATIENCE_S: Final = 20.0
_STOP_PATIENCE_S: Final = 15.0


@final
@dataclass(frozen=True, slots=True)
class MonitorStatus:
    """Whether a monitor writes to a directory."""

    running: bool
    log_path: Path
    pid: int | None = None
    vendor: str | None = None
    num_samples: int | None = None
    """Lines in the record so far."""


def check_vendor(vendor: str) -> Path:
    """Return the folder of a vendor whose devices can be asked for.

    Raises:
        RequestError: the vendor is unknown.
        SpecError: its description or how it is read is wrong; every problem is named.
    """
    folder = find("vendors", vendor, "--vendor").path
    telemetry_of(load_vendor(vendor), str(folder / "vendor.yaml"))
    return folder


def start(vendor: str, log_path: Path, interval_s: float = 1.0) -> MonitorStatus:
    """Start a monitor that writes to ``log_path`` and goes on when this process ends.

    A record of an earlier one there is kept, as ``telemetry-<when it ended>.jsonl``.

    Raises:
        RequestError: the vendor is unknown, or a monitor already writes there.
        SpecError: the vendor's folder is wrong: nothing of its devices would be recorded.
        RunError: it did not start; its own words are in the message.
    """
    folder = check_vendor(vendor)
    now = status(log_path)
    if now.running:
        raise RequestError(f"a monitor (process {now.pid}) already writes to {log_path}; stop it or restart")
    try:
        log_path.mkdir(parents=True, exist_ok=True)
        _keep(log_path / RECORD_FILE)
        config = {"vendor": vendor, "vendor_folder": str(folder), "interval_s": interval_s, "detached": True}
        (log_path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        with (log_path / _ERRORS).open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "accelmark.telemetry.record", str(log_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        entry = {"pid": process.pid, "started": _started(process.pid), "vendor": vendor}
        (log_path / PID_FILE).write_text(json.dumps(entry) + "\n")
    except OSError as error:
        raise RunError(f"nothing can be written to {log_path}: {error.strerror}") from error
    deadline = time.monotonic() + _START_PATIENCE_S
    while not _num_samples(log_path):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            said = (log_path / _ERRORS).read_text(errors="replace").strip() or "it said nothing"
            (log_path / PID_FILE).unlink(missing_ok=True)
            raise RunError(f"the monitor did not start: {said}")
        time.sleep(0.05)
    # It outlives this process; the handle is not needed to find it again.
    process.returncode = 0
    return status(log_path)


def _keep(record: Path) -> None:
    """Rename a record that is there already after the time of its last line; clocks and devices may be others since."""
    if not record.exists():
        return
    ended = f"{record.stem}-{datetime.fromtimestamp(record.stat().st_mtime, UTC):%Y%m%dT%H%M%SZ}"
    kept, number = record.with_name(f"{ended}{record.suffix}"), 2
    while kept.exists():
        kept, number = record.with_name(f"{ended}-{number}{record.suffix}"), number + 1
    record.rename(kept)


def stop(log_path: Path) -> bool:
    """End the monitor that writes to ``log_path``; tell whether there was one.

    Raises:
        RunError: it does not end.
    """
    now = status(log_path)
    if not now.running or now.pid is None:
        (log_path / PID_FILE).unlink(missing_ok=True)
        return False
    os.kill(now.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_PATIENCE_S
    while status(log_path).running:
        if time.monotonic() > deadline:
            raise RunError(f"the monitor (process {now.pid}) does not end; end it with kill -9 {now.pid}")
        _reap(now.pid)
        time.sleep(0.05)
    (log_path / PID_FILE).unlink(missing_ok=True)
    return True


def status(log_path: Path) -> MonitorStatus:
    """Tell whether a monitor writes to ``log_path``."""
    try:
        entry = json.loads((log_path / PID_FILE).read_text())
        pid, started, vendor = int(entry["pid"]), entry["started"], str(entry["vendor"])
    except (OSError, ValueError, KeyError, TypeError):
        return MonitorStatus(False, log_path)
    # A process id is used again one day; the time at which the process began is not.
    if started is None or _started(pid) != started:
        return MonitorStatus(False, log_path, None, vendor, _num_samples(log_path))
    return MonitorStatus(True, log_path, pid, vendor, _num_samples(log_path))


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks since boot; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _num_samples(log_path: Path) -> int:
    try:
        with (log_path / RECORD_FILE).open("rb") as file:
            return sum(line.startswith(b'{"t"') for line in file)
    except OSError:
        return 0


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
