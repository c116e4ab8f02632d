"""FlagPerf's monitor logs: write them, and use an unchanged monitor script that writes one as a device source."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final, final

from accelmark.spec.errors import raising
from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError
from accelmark.telemetry.forms import ScriptRule, UnreadableError, Values, device_sample, number, parse_number
from accelmark.telemetry.host import HostSample
from accelmark.telemetry.record import LineFile
from accelmark.telemetry.sources import CommandError, run_command

_INTERVAL_S: Final = 5.0
"""FlagPerf's sampling interval."""
_STAMP: Final = "%Y-%m-%d-%H:%M:%S"
_HOST_LOGS: Final = ("cpu", "mem", "pwr")
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d")
_BLOCK_S: Final = 20.0
"""Longest wait for the script's next block."""
_CONTROL_S: Final = 30.0
_CLOSING_S: Final = 10.0


@final
class MonitorScript:
    """Runs ``<vendor>_monitor.py -o start -l DIR``, follows the log that it writes, and stops it when closed.

    The script samples at its own interval (5 s in FlagPerf); ``sample`` waits for its next block. ``rule`` is the
    format of a device's line in the log, ``<name of the script>.log`` in ``log_dir``.
    """

    def __init__(self, script: Path, log_dir: Path, rule: ScriptRule) -> None:
        self._script = script
        self._log_dir = log_dir
        self._log = log_dir / f"{script.stem}.log"
        self._rule = rule
        self._offset = 0
        self._started = False
        self._interrupted = threading.Event()
        self.closing_s = _CLOSING_S
        """Maximum duration of stopping the script: FlagPerf's scripts wait a second after each signal."""

    def open(self) -> tuple[DeviceInfo, ...]:
        """Start the script and wait for its first block."""
        if not self._script.is_file():
            raise SourceError(f"{self._script} does not exist")
        self._started = True
        try:
            self._control("start")
        except SourceError:  # a stale pid file
            self._control("restart")
        names = [field.name for field in fields(DeviceSample) if field.name not in ("index", "age_s")]
        why = f"{self._script.name} does not report it"
        return tuple(
            DeviceInfo(
                index=at,
                name="unknown",
                memory_total_mib=number(values, "memory_total_mib"),
                reasons={name: why for name in names if values.get(name) is None},
            )
            for at, values in enumerate(self._next_block())
        )

    def sample(self) -> tuple[DeviceSample, ...]:
        """Wait for the script's next block and read it."""
        return tuple(device_sample(at, values) for at, values in enumerate(self._next_block()))

    def interrupt(self) -> None:
        """End a wait for the next block; called from another thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Stop the script."""
        if self._started:
            self._started = False
            with contextlib.suppress(SourceError):
                self._control("stop")

    def _control(self, operation: str) -> None:
        command = [sys.executable, str(self._script), "-o", operation, "-l", str(self._log_dir)]
        with raising(SourceError, f"{self._script.name} -o {operation}", CommandError):
            run_command(command, _CONTROL_S)

    def _next_block(self) -> tuple[Values, ...]:
        deadline = time.monotonic() + _BLOCK_S
        while time.monotonic() < deadline:
            block = self._complete_block()
            if block is not None:
                timestamp, *lines = [" ".join(line.split()) for line in block.strip().splitlines()] or [""]
                if not _TIMESTAMP.fullmatch(timestamp):
                    raise SourceError(f"a block of the script's log starts with {timestamp[:40]!r}, not with a time")
                devices: list[Values] = []
                for line in lines:
                    match = re.fullmatch(self._rule.line, line)
                    if match is None:
                        raise SourceError(f"the line {line[:60]!r} of the script's log does not match")
                    with raising(SourceError, "the script's log is not readable", UnreadableError):
                        devices.append(
                            {name: parse_number(name, text or "") for name, text in match.groupdict().items()}
                        )
                if not devices:
                    raise SourceError("the script's log lists no device")
                return tuple(devices)
            if self._interrupted.wait(0.2):
                raise SourceError(f"{self._script.name} was interrupted while waiting for its next block")
        raise SourceError(f"{self._script.name} wrote nothing to {self._log.name} for {_BLOCK_S:g} s")

    def _complete_block(self) -> str | None:
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return None
        end = data.rfind(b"\n\n")
        if end < 0:
            return None
        self._offset += end + 2
        return data[:end].decode("utf-8", errors="replace").rpartition("\n\n")[2]


@final
class MonitorLogs:
    """FlagPerf's monitor logs of one host; ``vendor`` is None if the vendor's own script writes that log."""

    def __init__(self, directory: Path, vendor: str | None) -> None:
        # For the vendor `cpu`, the name would be the same as the host log's.
        names = dict.fromkeys((*_HOST_LOGS, *([vendor] if vendor is not None else [])))
        self._logs = {name: LineFile(directory / f"{name}_monitor.log") for name in names}
        self._vendor = self._logs[vendor] if vendor is not None and vendor not in _HOST_LOGS else None
        self._next_s: dict[LineFile, float] = {}
        self._unavailable: set[str] = set()

    def write(self, t: float, wall: float, host: HostSample, devices: Sequence[DeviceSample]) -> None:
        """Append a sample to each log that is due, and to the power log whenever there is a reading."""
        stamp = time.strftime(_STAMP, time.localtime(wall))
        if host.power_w is not None:
            self._logs["pwr"].write(f"{stamp}\t{host.power_w:.1f}")
        if host.cpu is not None and self._due(self._logs["cpu"], t):
            self._logs["cpu"].write(f"{stamp}\t{host.cpu:.4f}")
        if host.mem_used_mib is not None and host.mem_total_mib and self._due(self._logs["mem"], t):
            self._logs["mem"].write(f"{stamp}\t{host.mem_used_mib / host.mem_total_mib:.4f}")
        if self._vendor is not None and devices and self._due(self._vendor, t):
            self._vendor.write("\n".join([stamp, *map(_device_line, devices)]) + "\n")

    def _due(self, log: LineFile, t: float) -> bool:
        if t < self._next_s.get(log, t):
            return False
        self._next_s[log] = t + _INTERVAL_S - 0.01
        return True

    def unavailable(self, wall: float, reasons: Mapping[str, str]) -> None:
        """Log once why the host power (``power_w``) or the devices (``devices``) cannot be read."""
        stamp = time.strftime(_STAMP, time.localtime(wall))
        for name in reasons.keys() - self._unavailable:
            if name == "power_w":
                self._logs["pwr"].write(f"{stamp}\tnot available: {reasons[name]}")
            elif name == "devices" and self._vendor is not None:
                self._vendor.write(f"{stamp}\nnot available: {reasons[name]}\n")
        self._unavailable.update(reasons)

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs.values():
            log.close()


def _device_line(device: DeviceSample) -> str:
    """Return a device's line: temperature, power, memory used, total memory, utilisation; N/A where unknown."""
    percent = None if device.utilisation is None else device.utilisation * 100
    figures = (
        (device.temperature_c, "C"),
        (device.power_w, "W"),
        (device.memory_used_mib, "MiB"),
        (device.memory_total_mib, "MiB"),
        (percent, "%"),
    )
    return " ".join("N/A" if value is None else f"{value:.0f}{unit}" for value, unit in figures)
