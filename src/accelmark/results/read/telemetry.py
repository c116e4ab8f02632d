"""Read ``telemetry.jsonl`` into columns: the samples of a host and its devices."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError, raising
from accelmark.spec.model import json_objects
from accelmark.spec.secret import LEFT_OUT

_NAN: Final = float("nan")
_FEWEST_READINGS: Final = 6
"""Equal readings of power from which they are taken for a constant."""


@dataclass
class Samples:
    """The samples of one host, in columns of the length of ``t``; NaN where a value is missing."""

    header: dict[str, Any] = field(default_factory=dict)
    """Of the last recorder."""
    footer: dict[str, Any] | None = None
    """Of the last recorder; None where it was killed."""
    cpu_times: list[float | None] = field(default_factory=list)
    """CPU seconds of each recorder, None where it was killed."""
    t: array[float] = field(default_factory=lambda: array("d"))
    """Monotonic seconds, increasing."""
    host: dict[str, array[float]] = field(default_factory=dict)
    devices: dict[int, dict[str, array[float]]] = field(default_factory=dict)
    throttle: dict[int, set[str]] = field(default_factory=dict)
    """Device -> all throttle reasons."""
    notes: list[str] = field(default_factory=list)
    """Notes of the recorder: a foreign process on a device, a monitor tool that failed."""
    malformed: int = 0
    is_edited: bool = False
    """Whether the lines before a footer do not have the hash that the recorder states in it."""

    @property
    def interval_s(self) -> float:
        """Seconds between samples, as configured."""
        return float(self.header.get("interval_s") or 1.0)

    def measures_cpus(self, device_type: str) -> bool:
        """Return whether the host's CPUs are the devices; a vendor of ``device_type`` cpu may have others."""
        return device_type == "cpu" and bool(self.header.get("devices_are_cpus", True))

    def reason(self, name: str) -> str:
        """Return why ``name`` is missing; the reasons of devices take precedence."""
        for record in (*self.infos.values(), self.footer or {}, self.header):
            if name in (record.get("reasons") or {}):
                return str(record["reasons"][name])
        return f"telemetry has no {name}"

    @property
    def infos(self) -> dict[int, dict[str, Any]]:
        """The header's description of each device, by index."""
        return {int(info.get("index", 0)): info for info in self.header.get("devices") or () if isinstance(info, dict)}

    def times(self, columns: Mapping[str, array[float]]) -> Sequence[float]:
        """Return the times of a device's readings: ``t`` minus their age."""
        ages = columns.get("age_s")
        if ages is None:
            return self.t
        return array("d", [t - (age if age == age else 0.0) for t, age in zip_strict(self.t, ages)])

    def readings(self, name: str) -> list[float]:
        """Return the readings of all devices, without missing ones."""
        return [number for columns in self.devices.values() for number in columns.get(name, ()) if number == number]

    def constant_power(self, index: int) -> str | None:
        """Return what a device's readings of power are where all are equal, so that they are no measurement.

        The recorder reads from before the ranks start until after they end, and a device takes more power while it
        computes.
        """
        readings = [watts for watts in self.devices[index].get("power_w", ()) if watts == watts]
        if len(readings) < _FEWEST_READINGS or len(set(readings)) > 1:
            return None
        return f"device {index}: all {len(readings)} readings of power are {readings[0]:g} W, idle and busy"


def read_samples(*paths: Path) -> Samples:
    """Read one host's ``telemetry.jsonl`` of each attempt, in order; malformed lines are counted and skipped."""
    samples = Samples()
    for path in paths:
        digest, is_redacted = hashlib.sha256(), False
        with raising(RunError, f"{path}: cannot be read", OSError), path.open("rb") as file:
            for line in file:
                if line.startswith(b'{"header"'):
                    digest = hashlib.sha256()  # a recorder that was started again hashes its own lines
                is_redacted |= LEFT_OUT.encode() in line  # by bundling
                footer = samples.footer
                if not _add(samples, line):
                    samples.malformed += 1
                if samples.footer is not None and samples.footer is not footer and not is_redacted:
                    samples.is_edited |= samples.footer.get("sha256", digest.hexdigest()) != digest.hexdigest()
                digest.update(line)
    return samples


def _add(samples: Samples, line: bytes) -> bool:
    entry = next(json_objects([line]), {})
    if isinstance(entry.get("header"), dict):
        samples.header, samples.footer = entry["header"], None
        samples.cpu_times.append(None)
    elif isinstance(entry.get("footer"), dict):
        samples.footer = entry["footer"]
        used = entry["footer"].get("cpu_time_s")
        samples.cpu_times[-1:] = [used if isinstance(used, (int, float)) else None]
    elif isinstance(entry.get("note"), dict):
        samples.notes.append(str(entry["note"].get("what")))
    elif isinstance(entry.get("t"), (int, float)):
        row = len(samples.t)
        if row and entry["t"] <= samples.t[-1]:
            return True
        samples.t.append(entry["t"])
        _append_row(samples.host, entry.get("host") or {}, row)
        for device in entry.get("devices") or ():
            index = int(device.get("index", 0))
            _append_row(samples.devices.setdefault(index, {}), device, row)
            reasons = device.get("throttle")
            if isinstance(reasons, list):
                samples.throttle.setdefault(index, set()).update(map(str, reasons))
        for columns in (samples.host, *samples.devices.values()):
            for column in columns.values():
                if len(column) == row:
                    column.append(_NAN)
    else:
        return False
    return True


def _append_row(columns: dict[str, array[float]], values: Mapping[str, Any], row: int) -> None:
    for name, value in values.items():
        if name == "index" or not isinstance(value, (int, float, type(None))) or isinstance(value, bool):
            continue
        column = columns.get(name)
        if column is None:
            column = columns[name] = array("d", [_NAN]) * row
        if len(column) == row:
            column.append(_NAN if value is None else value)
