"""Reading ``telemetry.jsonl`` back, also one that was cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

Json = dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """A host's telemetry as it was written."""

    header: Json = field(default_factory=dict)
    samples: tuple[Json, ...] = ()
    """Lines with ``t``, ``wall``, ``host`` and ``devices``, in the order of ``t``."""
    notes: tuple[Json, ...] = ()
    footer: Json | None = None
    """None where the recorder was killed."""
    num_broken: int = 0
    """Lines that are not whole."""

    @property
    def reasons(self) -> dict[str, str]:
        """Figure -> why it is null, from the header and, newer, the footer."""
        return {**self.header.get("reasons", {}), **(self.footer or {}).get("reasons", {})}

    def device_series(self, index: int, name: str) -> list[tuple[float, float]]:
        """Return (monotonic s, value) of one field of one device, where it was read."""
        return [
            (sample["t"] - device.get("age_s", 0.0), float(device[name]))
            for sample in self.samples
            for device in sample["devices"]
            if device.get("index") == index and _is_number(device.get(name))
        ]

    def host_series(self, name: str) -> list[tuple[float, float]]:
        """Return (monotonic s, value) of one field of the host, where it was read."""
        return [
            (sample["t"], float(sample["host"][name]))
            for sample in self.samples
            if _is_number(sample["host"].get(name))
        ]

    @property
    def device_indices(self) -> tuple[int, ...]:
        """The devices that the header names or, without a header, that were sampled."""
        named = {int(device["index"]) for device in self.header.get("devices", ())}
        seen = {int(device["index"]) for sample in self.samples for device in sample["devices"]}
        return tuple(sorted(named or seen))


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        return parse_recording(file)


def parse_recording(lines: Iterable[str]) -> Recording:
    """Read the lines of a recording; lines that are not whole are counted and left out."""
    header: Json = {}
    footer: Json | None = None
    samples: list[Json] = []
    notes: list[Json] = []
    num_broken = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            num_broken += 1
        elif isinstance(value.get("header"), dict):
            header = value["header"]
        elif isinstance(value.get("footer"), dict):
            footer = value["footer"]
        elif isinstance(value.get("note"), dict):
            notes.append(value["note"])
        elif _is_sample(value):
            samples.append(value)
        else:
            num_broken += 1
    samples.sort(key=lambda sample: float(sample["t"]))
    return Recording(header, tuple(samples), tuple(notes), footer, num_broken)


def _is_sample(value: Json) -> bool:
    devices = value.get("devices")
    return (
        _is_number(value.get("t"))
        and isinstance(value.get("host"), dict)
        and isinstance(devices, list)
        and all(isinstance(device, dict) and isinstance(device.get("index"), int) for device in devices)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
