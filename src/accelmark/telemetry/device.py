"""The interface of a device reader: its methods and the types that they return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable


class SourceError(Exception):
    """The devices cannot be read; the message is the reason that is recorded."""


@final
@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device that do not change while it is recorded."""

    index: int
    name: str
    uuid: str | None = None
    driver: str | None = None
    memory_total_mib: float | None = None
    power_limit_w: float | None = None
    bus_id: str | None = None
    power_in: int | None = None
    """The device whose power reading includes this one's (two dies on one card)."""
    details: dict[str, str] = field(default_factory=dict)
    """Further properties that the vendor reports (ECC mode, clock limits)."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Field of a ``DeviceSample`` -> why this device does not report it."""

    @property
    def memory_gib(self) -> float | None:
        """Device memory in GiB, as ``VendorSpec.chip_of`` takes it."""
        return None if self.memory_total_mib is None else self.memory_total_mib / 1024


@final
@dataclass(frozen=True)
class DeviceSample:
    """One sample of one device; a value that was not read is None."""

    index: int
    utilisation: float | None = None
    """Share of the last sampling period in which the device was busy, 0..1."""
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    """Current reasons for reduced clocks."""
    energy_j: float | None = None
    """The device's energy counter, cumulative."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    pids: Mapping[int, float | None] | None = None
    """Process that holds memory on the device -> that memory in MiB, None where it is not known."""
    age_s: float = 0.0
    """Seconds from this reading to the line's ``t``."""


@runtime_checkable
class DeviceSource(Protocol):
    """Reads the devices of one vendor. It is called from a dedicated thread and may block.

    Optional members: ``closing_s``, the maximum duration of ``close``, and ``interrupt()``, which is called from
    another thread to end a wait in ``sample``.
    """

    def open(self) -> tuple[DeviceInfo, ...]:
        """Open the devices and return their properties; raises SourceError if the devices cannot be opened."""
        ...

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read every device once; raises SourceError if the devices cannot be read this time."""
        ...

    def close(self) -> None:
        """Release the devices; never raises."""
        ...
