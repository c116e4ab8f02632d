"""What one sample holds. A figure that could not be read is None; why stands beside the device or in the header."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What does not change about a device while it is watched."""

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
    """What else its maker reports (ECC mode, clock limits), as it is written."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Field of a ``DeviceSample`` -> why this device does not give it."""

    @property
    def memory_gib(self) -> float | None:
        """Device memory in GiB, as ``VendorSpec.chip_of`` takes it."""
        return None if self.memory_total_mib is None else self.memory_total_mib / 1024

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device at one moment."""

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
    """What holds the clocks down right now."""
    energy_j: float | None = None
    """The device's own energy counter, cumulative."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    pids: tuple[int, ...] | None = None
    """Processes that hold memory on the device."""
    age_s: float = 0.0
    """How long before the line's ``t`` this was read."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; ``age_s`` only where it is not zero."""
        values = asdict(self)
        if not self.age_s:
            del values["age_s"]
        return values


@final
@dataclass(frozen=True, slots=True)
class HostSample:
    """One host at one moment; rates are over the time since the sample before."""

    cpu: float | None = None
    """Share of all cores that was busy, 0..1."""
    mem_used_mib: float | None = None
    mem_total_mib: float | None = None
    load1: float | None = None
    psi_cpu: float | None = None
    """Percent of the last 10 s in which some task waited for this resource (``/proc/pressure``)."""
    psi_memory: float | None = None
    psi_io: float | None = None
    disk_read_mib_s: float | None = None
    disk_write_mib_s: float | None = None
    net_rx_mib_s: float | None = None
    net_tx_mib_s: float | None = None
    """All interfaces but loopback."""
    power_w: float | None = None
    """The whole host, as its management controller (IPMI) tells."""
    rapl_j: float | None = None
    """Energy of all CPU packages, cumulative since the recorder started."""
    rank_rss_mib: float | None = None
    """Resident memory of the watched processes and their children."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)
