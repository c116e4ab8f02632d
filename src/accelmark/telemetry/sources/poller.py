"""Read devices in a thread, so that a slow or hanging source does not block the recorder."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from accelmark.telemetry.device import DeviceInfo, DeviceSample, DeviceSource, SourceError

_PROMPT_S: Final = 0.02
"""A reading at most this far from its line's time is recorded without an age."""


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
        self._sources = sources
        self._tick = threading.Event()
        self._done = threading.Event()
        self._stop = threading.Event()
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self._fresh: Reading | None = None
        self._infos: tuple[DeviceInfo, ...] = ()
        self._problem: str | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="devices")

    def start(self) -> None:
        """Start opening the sources."""
        self._thread.start()

    @property
    def opened(self) -> bool:
        """Whether opening has finished, with or without success."""
        return self._opened.is_set()

    @property
    def infos(self) -> tuple[DeviceInfo, ...]:
        """The devices; empty until they are open and where opening failed."""
        with self._lock:
            return self._infos

    @property
    def problem(self) -> str | None:
        """Why no source could be opened, or None."""
        with self._lock:
            return self._problem

    def read(self, patience_s: float) -> Reading | None:
        """Request a reading and return one that was not returned before, waiting at most ``patience_s``.

        Returns None while an earlier request is still running.
        """
        if not self._opened.is_set() or self.problem is not None:
            return None
        with self._lock:
            idle = self._busy_since is None and self._fresh is None
            if idle:
                self._busy_since = time.monotonic()
                self._done.clear()
        if idle:
            self._tick.set()
        self._done.wait(patience_s)
        with self._lock:
            fresh, self._fresh = self._fresh, None
            return fresh

    def waiting_s(self) -> float:
        """Return the seconds since the current request started; 0 without one."""
        with self._lock:
            return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    def close(self, patience_s: float = 1.0) -> None:
        """Stop the thread; a source that hangs ends with the process.

        ``closing_s`` and ``interrupt`` of a source are described in ``DeviceSource``.
        """
        self._stop.set()
        self._tick.set()
        for source in self._sources:
            patience_s = max(patience_s, getattr(source, "closing_s", 0.0))
            interrupt = getattr(source, "interrupt", None)
            if interrupt is not None:
                interrupt()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        source = self._open()
        self._opened.set()
        if source is None:
            return
        while True:
            self._tick.wait()
            self._tick.clear()
            if self._stop.is_set():
                break
            begun = time.monotonic()
            devices, problem = _sample(source)
            middle = (begun + time.monotonic()) / 2
            with self._lock:
                self._fresh = Reading(middle, devices, problem)
                self._busy_since = None
            self._done.set()
        source.close()

    def _open(self) -> DeviceSource | None:
        problems: list[str] = []
        for source in self._sources:
            try:
                infos = source.open()
            except SourceError as error:
                problems.append(str(error))
            except Exception as error:  # noqa: BLE001 - a vendor's reader may raise anything; recorded
                problems.append(f"{type(source).__name__}.open() raises {type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._infos = infos
                return source
        with self._lock:
            self._problem = "; ".join(problems) or "no device source"
        return None


def _sample(source: DeviceSource) -> tuple[tuple[DeviceSample, ...], str | None]:
    try:
        return source.sample(), None
    except SourceError as error:
        return (), str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return (), f"{type(source).__name__}.sample() raises {type(error).__name__}: {error}"


def with_age(reading: Reading, t: float) -> tuple[DeviceSample, ...]:
    """Return a reading's devices for a line at ``t``, with their age where it is not negligible."""
    age = t - reading.t
    if abs(age) < _PROMPT_S:
        return reading.devices
    return tuple(replace(device, age_s=round(age, 4)) for device in reading.devices)
