"""Read devices in a thread, so that a slow or hanging source does not block the recorder."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from accelmark.telemetry.device import DeviceInfo, DeviceSample, DeviceSource, SourceError
from accelmark.telemetry.sources import first_readable

_NEGLIGIBLE_AGE_S: Final = 0.02


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of all devices, or why it failed."""

    t: float
    """Monotonic seconds: the middle of the reading."""
    devices: tuple[DeviceSample, ...] = ()
    problem: str | None = None


@final
class Poller:
    """Opens the first source that works and reads it once per request.

    Args:
        sources: ways to read the devices, best first.
    """

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
        """Request a reading and return one that was not returned before, waiting at most ``patience_s``.

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
                reading = Reading((began + time.monotonic()) / 2, devices)
            except SourceError as error:
                reading = Reading(began, problem=str(error))
            except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
                reading = Reading(began, problem=f"{type(source).__name__} raises {type(error).__name__}: {error}")
            self._readings.put(reading)
        source.close()


def with_age(reading: Reading, t: float) -> tuple[DeviceSample, ...]:
    """Return a reading's devices for a line at ``t``, with their age if it is not negligible."""
    age = t - reading.t
    if abs(age) < _NEGLIGIBLE_AGE_S:
        return reading.devices
    return tuple(replace(device, age_s=round(age, 4)) for device in reading.devices)
