"""Measured ceilings of a device: what ``accelmark probe`` found it can really do."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from accelmark.spec.model import Spec

CEILINGS_FILE: Final = "ceilings.json"
"""Written by rank 0 of a probe into the directory of its host."""

ProbeItem = Literal["matmul", "memory", "copies", "collectives"]


class Rate(Spec):
    """A measured rate; ``value`` is null only together with a ``reason``."""

    value: float | None
    unit: Literal["TFLOP/s", "TOP/s", "GB/s"]
    reason: str | None = None
    size: str | None = None
    """The problem size that gave it."""
    repetitions: int = 0


class Ceilings(Spec):
    """What one device (and for collectives, the group) reached."""

    schema_version: Literal[1] = 1
    device_type: str
    device_name: str
    world_size: int
    framework: str
    measured_at: str
    """UTC, ISO 8601."""
    matmul: dict[str, Rate] = Field(default_factory=dict)
    """Precision -> dense matrix product, 2MNK operations each."""
    memory: dict[str, Rate] = Field(default_factory=dict)
    """``copy`` and ``triad``: bytes read and written."""
    copies: dict[str, Rate] = Field(default_factory=dict)
    """``host_to_device`` and ``device_to_host``, pinned memory."""
    collectives: dict[str, Rate] = Field(default_factory=dict)
    """``all_reduce`` as bus bandwidth (algorithm bandwidth x 2(n-1)/n), ``point_to_point``."""
    disturbed: tuple[str, ...] = ()
    """What else the host had to do, before the probe or beside it: such rates are lower than what the device can do."""
