"""The interface of a device reader, its types, and the base class of readers that call a vendor's library."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from accelmark.spec.errors import raising


class SourceError(Exception):
    """The devices cannot be read; the message is the reason that is recorded."""


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
    reasons: dict[str, str] = field(default_factory=dict)
    """Field of a ``DeviceSample`` -> why this device does not report it."""

    @property
    def memory_gib(self) -> float | None:
        """Device memory in GiB, as ``VendorSpec.chip_of`` takes it."""
        return None if self.memory_total_mib is None else self.memory_total_mib / 1024


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
    energy_j: float | None = None
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


Readers = Mapping[str, Callable[[], Any]]
"""Field -> function that reads it; its exception, or a value of None, becomes the reason of the field's None."""
_SAMPLED = frozenset(DeviceSample.__dataclass_fields__)


class LibrarySource(ABC):
    """Reads all GPUs that a library lists, field by field; ``library`` None: imported when they are opened."""

    module: ClassVar[str]
    title: ClassVar[str]
    missing: ClassVar[str]
    """Advice where the module cannot be imported."""
    error: ClassVar[str]
    essential: ClassVar[tuple[str, ...]] = ("utilisation", "memory_used_mib")
    """Fields; every working GPU reports at least one."""

    def __init__(self, library: Any = None) -> None:
        self.library = library
        self.handles: list[Any] = []
        self._reasons: list[dict[str, str]] = []

    @abstractmethod
    def start(self) -> list[Any]:
        """Initialise the library; return the handles of its GPUs."""

    @abstractmethod
    def stop(self) -> None:
        """Shut the library down."""

    @abstractmethod
    def readers(self, at: int) -> Readers:
        """Return the readers of GPU ``at`` for the fields of :class:`DeviceSample`."""

    @abstractmethod
    def info(self, at: int, first: DeviceSample, reasons: dict[str, str]) -> DeviceInfo:
        """Return the properties of GPU ``at``; ``reasons`` has the fields of its ``first`` sample that are None."""

    def open(self) -> tuple[DeviceInfo, ...]:
        """Initialise the library and name the GPUs."""
        if self.library is None:
            what = f"{self.module} cannot be imported; {self.missing}"
            with raising(SourceError, what, ImportError, OSError, KeyError):
                self.library = importlib.import_module(self.module)
        with raising(SourceError, f"{self.title}", self._error):
            self.handles = self.start()
        if not self.handles:
            raise SourceError(f"{self.title} shows no GPU")
        self._reasons = [{} for _ in self.handles]
        return tuple(self.info(at, first, dict(self._reasons[at])) for at, first in enumerate(self.sample()))

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read every GPU once; a field that the library cannot read is None."""
        samples = tuple(DeviceSample(at, **self.read(at, self.readers(at))) for at in range(len(self.handles)))
        if all(getattr(sample, name) is None for sample in samples for name in self.essential):
            reason = next(iter(self._reasons[0].values()), "no reason given") if self._reasons else "not open"
            raise SourceError(f"{self.title} no longer answers: {reason}")
        return samples

    def close(self) -> None:
        """Shut the library down."""
        if self.handles:
            self.handles = []
            with contextlib.suppress(self._error):
                self.stop()

    @property
    def _error(self) -> type[Exception]:
        error: type[Exception] = getattr(self.library, self.error)
        return error

    def read(self, at: int, readers: Readers) -> dict[str, Any]:
        """Return the value of each field of GPU ``at``, None where it cannot be read."""
        values: dict[str, Any] = {}
        for name, reader in readers.items():
            values[name], reason = None, f"{self.title} gives N/A"
            try:
                values[name] = reader()
            except self._error as error:
                reason = f"{self.title}: {error}"
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                reason = f"this {self.title} lacks it or gives it in another form: {error!r}"
            self._reasons[at].pop(name, None)
            if values[name] is None and name in _SAMPLED:
                self._reasons[at][name] = reason
        return values
