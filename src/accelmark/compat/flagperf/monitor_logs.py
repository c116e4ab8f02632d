"""Write monitor logs with FlagPerf's file names and line formats."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from accelmark.telemetry.device import DeviceSample
from accelmark.telemetry.host.sampler import HostSample
from accelmark.telemetry.line_file import LineFile

INTERVAL_S: Final = 5.0
"""FlagPerf's sampling interval."""
TIMESTAMP: Final = "%Y-%m-%d-%H:%M:%S"


@final
class MonitorLogs:
    """``cpu_monitor.log``, ``mem_monitor.log``, ``pwr_monitor.log`` and ``<vendor>_monitor.log`` of one host.

    Args:
        directory: the node's directory.
        vendor: name of the vendor, or None if the vendor's own script writes that log.

    Raises:
        OSError: the directory is not writable.
    """

    def __init__(self, directory: Path, vendor: str | None) -> None:
        self._cpu = LineFile(directory / "cpu_monitor.log")
        self._memory = LineFile(directory / "mem_monitor.log")
        self._power = LineFile(directory / "pwr_monitor.log")
        # For the vendor `cpu`, the name would be the same as the host log's.
        name = None if vendor is None else f"{vendor}_monitor.log"
        hosts = {file.path.name for file in (self._cpu, self._memory, self._power)}
        self._vendor = None if name is None or name in hosts else LineFile(directory / name)
        self._next_s: dict[LineFile, float] = {}
        self._unavailable: set[str] = set()

    def write(self, t: float, wall: float, host: HostSample, devices: Sequence[DeviceSample]) -> None:
        """Append a sample to each log that is due, and to the power log whenever there is a reading."""
        stamp = time.strftime(TIMESTAMP, time.localtime(wall))
        if host.power_w is not None:
            self._power.write(f"{stamp}\t{host.power_w:.1f}")
        if host.cpu is not None and self._due(self._cpu, t):
            self._cpu.write(f"{stamp}\t{host.cpu:.4f}")
        if host.mem_used_mib is not None and host.mem_total_mib and self._due(self._memory, t):
            self._memory.write(f"{stamp}\t{host.mem_used_mib / host.mem_total_mib:.4f}")
        if self._vendor is not None and devices and self._due(self._vendor, t):
            lines = "\n".join(device_line(device) for device in devices)
            self._vendor.write(f"{stamp}\n{lines}\n")

    def _due(self, log: LineFile, t: float) -> bool:
        if t < self._next_s.get(log, t):
            return False
        self._next_s[log] = t + INTERVAL_S - 0.01
        return True

    def unavailable(self, wall: float, reasons: Mapping[str, str]) -> None:
        """Log once why the host power (``power_w``) or the devices (``devices``) cannot be read."""
        stamp = time.strftime(TIMESTAMP, time.localtime(wall))
        for name in reasons.keys() - self._unavailable:
            if name == "power_w":
                self._power.write(f"{stamp}\tnot available: {reasons[name]}")
            elif name == "devices" and self._vendor is not None:
                self._vendor.write(f"{stamp}\nnot available: {reasons[name]}\n")
        self._unavailable.update(reasons)

    def close(self) -> None:
        """Close all logs."""
        for log in (self._cpu, self._memory, self._power, self._vendor):
            if log is not None:
                log.close()


def device_line(device: DeviceSample) -> str:
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
