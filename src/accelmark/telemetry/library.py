"""Base class of device readers that call a vendor's Python library."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError

Readers = Mapping[str, Callable[[], Any]]
"""Field -> function that reads it; its exception, or a value of None, becomes the reason of the field's None."""
_SAMPLED = frozenset(DeviceSample.__dataclass_fields__)


class LibrarySource(ABC):
    """Reads all GPUs that a library lists, field by field.

    Args:
        library: the module; None: imported when the devices are opened.
    """

    module: ClassVar[str]
    title: ClassVar[str]
    """Name of the library in messages."""
    missing: ClassVar[str]
    """Advice where the module cannot be imported."""
    error: ClassVar[str]
    """Name of the library's exception."""
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
            try:
                self.library = importlib.import_module(self.module)
            except (ImportError, OSError, KeyError) as error:
                raise SourceError(f"{self.module} cannot be imported ({error}); {self.missing}") from error
        try:
            self.handles = self.start()
        except self._error as error:
            raise SourceError(f"{self.title}: {error}") from error
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
        return {name: self._value(at, name, reader) for name, reader in readers.items()}

    def _value(self, at: int, name: str, read: Callable[[], Any]) -> Any:
        try:
            value = read()
            reason = f"{self.title} gives N/A"
        except self._error as error:
            value, reason = None, f"{self.title}: {error}"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            value, reason = None, f"this {self.title} lacks it or gives it in another form: {error!r}"
        if value is None and name in _SAMPLED:
            self._reasons[at][name] = reason
        else:
            self._reasons[at].pop(name, None)
        return value
