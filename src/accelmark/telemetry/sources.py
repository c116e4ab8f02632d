"""Device sources of a vendor (its own library, its command-line tool, a FlagPerf monitor script), read in a thread."""

from __future__ import annotations

import importlib
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar, final

from accelmark.spec.plugins.catalog import file_module
from accelmark.telemetry.declaration import VendorTelemetry
from accelmark.telemetry.device import DeviceInfo, DeviceSample, DeviceSource, SourceError
from accelmark.telemetry.forms import implausible_power
from accelmark.telemetry.tool import ToolSource

T = TypeVar("T")

MODULE_FILE: Final = "telemetry.py"
"""A vendor's own reader; it defines a class ``Source``, called without arguments."""
_SCRIPT_SOURCE: Final = "accelmark.compat.flagperf.monitor:MonitorScript"
"""Imported by name at run time, since ``compat`` depends on telemetry."""


def device_sources(folder: Path, telemetry: VendorTelemetry, log_dir: Path | None = None) -> tuple[DeviceSource, ...]:
    """Return the ways to read a vendor's devices, best first, at least one.

    ``log_dir`` is where a FlagPerf monitor script writes its log; without it scripts are left out.

    Raises SourceError: ``telemetry.py`` cannot be used, or nothing is declared; the message says why.
    """
    sources: list[DeviceSource] = []
    if (folder / MODULE_FILE).is_file():
        path = folder / MODULE_FILE
        try:
            source = _import(path).Source()
        except Exception as error:
            raise SourceError(f"{path}: Source cannot be used: {type(error).__name__}: {error}") from error
        if not isinstance(source, DeviceSource):
            raise SourceError(f"Source in {path} lacks open(), sample() or close()")
        sources.append(source)
    if telemetry.tool is not None:
        sources.append(ToolSource(telemetry.tool))
    if telemetry.script is not None and log_dir is not None:
        sources.append(pkgutil.resolve_name(_SCRIPT_SOURCE)(folder / telemetry.script.file, log_dir, telemetry.script))
    if not sources:
        raise SourceError(telemetry.reasons.get("devices", "the vendor declares no way to read its devices"))
    return tuple(sources)


def first_readable(sources: Iterable[DeviceSource], read: Callable[[DeviceSource], T]) -> tuple[DeviceSource, T]:
    """Return the first source that ``read`` succeeds with, and its result; closes those that fail.

    Raises SourceError with the reason of each if none succeeds.
    """
    problems: list[str] = []
    for source in sources:
        try:
            return source, read(source)
        except SourceError as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
            problems.append(f"{type(source).__name__} raises {type(error).__name__}: {error}")
        source.close()
    raise SourceError("; ".join(problems) or "no device source")


def _import(path: Path) -> ModuleType:
    if path.parent.parent == Path(__file__).parents[1] / "vendors":
        return importlib.import_module(f"accelmark.vendors.{path.parent.name}.{path.stem}")
    return file_module(f"_accelmark_vendor_{path.parent.name}_telemetry", path)


@final
@dataclass(frozen=True)
class Reading:
    """One reading of all devices, or why it failed."""

    t: float
    """Monotonic seconds: the middle of the reading."""
    devices: tuple[DeviceSample, ...] = ()
    problem: str | None = None


@final
class Poller:
    """Opens the first source that works and reads it once per request."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self.infos: tuple[DeviceInfo, ...] = ()
        """The devices; empty before opening and after a failure."""
        self.problem: str | None = None
        """Why no source could be opened, or None."""
        self.opened = False
        """Whether opening has finished or failed; set after ``infos`` and ``problem``."""
        self._sources = sources
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._requested_at: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="devices")

    def start(self) -> None:
        """Start opening the sources."""
        self._thread.start()

    def read(self, patience_s: float) -> Reading | None:
        """Request a reading and return the next new reading, waiting at most ``patience_s``.

        Returns None while an earlier request is still running.
        """
        if not self.opened or self.problem is not None:
            return None
        if self._requested_at is None:
            self._requested_at = time.monotonic()
            self._requests.put(True)
        try:
            reading = self._readings.get(timeout=patience_s)
        except queue.Empty:
            return None
        self._requested_at = None
        return reading

    def waiting_s(self) -> float:
        """Return the seconds since the current request started; 0 without one."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def close(self, patience_s: float = 1.0) -> None:
        """Stop the thread; a source that hangs ends with the process.

        ``closing_s`` and ``interrupt`` of a source are described in ``DeviceSource``.
        """
        self._requests.put(False)
        for source in self._sources:
            patience_s = max(patience_s, getattr(source, "closing_s", 0.0))
            interrupt = getattr(source, "interrupt", None)
            if interrupt is not None:
                interrupt()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            source, self.infos = first_readable(self._sources, lambda source: source.open())
        except SourceError as error:
            self.problem = str(error)
            return
        finally:
            self.opened = True
        while self._requests.get():
            began = time.monotonic()
            try:
                devices = source.sample()
                problem = implausible_power(devices)
                reading = Reading((began + time.monotonic()) / 2, () if problem else devices, problem)
            except SourceError as error:
                reading = Reading(began, problem=str(error))
            except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
                reading = Reading(began, problem=f"{type(source).__name__} raises {type(error).__name__}: {error}")
            self._readings.put(reading)
        source.close()
