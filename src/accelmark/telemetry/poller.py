"""A thread that reads devices when asked, so that a slow or hanging source never holds up the recorder."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from accelmark.telemetry.sample import DeviceInfo, DeviceSample
from accelmark.telemetry.source import DeviceSource, SourceError

_PROMPT_S: Final = 0.02
"""A reading this close to its line's time counts as taken then."""


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """All devices at one moment, or why they could not be read."""

    t: float
    """Monotonic seconds: the middle of the reading."""
    devices: tuple[DeviceSample, ...] = ()
    problem: str | None = None


@final
class Poller:
    """Opens the first source that answers and reads it once for each ``tick``.

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
        """Begin to open the sources."""
        self._thread.start()

    @property
    def opened(self) -> bool:
        """Whether the sources were tried, with or without success."""
        return self._opened.is_set()

    @property
    def infos(self) -> tuple[DeviceInfo, ...]:
        """The devices; empty before they are open and where they cannot be."""
        with self._lock:
            return self._infos

    @property
    def problem(self) -> str | None:
        """Why no source could be opened, or None."""
        with self._lock:
            return self._problem

    def read(self, patience_s: float) -> Reading | None:
        """Ask for a reading and return one that was not returned before, waiting at most ``patience_s`` for it.

        Returns None while the source is still busy with an earlier request.
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
        """How long the source has been busy with the present request, in s."""
        with self._lock:
            return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    def close(self, patience_s: float = 1.0) -> None:
        """End the thread; a source that hangs is left behind with the process.

        A source with something of its own to end says how long that may take (``closing_s``) and lets go of what it
        waits for (``interrupt``).
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
            except Exception as error:  # noqa: BLE001 - a vendor's reader may raise anything; the reason is recorded
                problems.append(f"{type(source).__name__}.open() raises {type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._infos = infos
                return source
        with self._lock:
            self._problem = "; ".join(problems) or "there is no way to read the devices"
        return None


def _sample(source: DeviceSource) -> tuple[tuple[DeviceSample, ...], str | None]:
    try:
        return source.sample(), None
    except SourceError as error:
        return (), str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return (), f"{type(source).__name__}.sample() raises {type(error).__name__}: {error}"


def aged(reading: Reading, t: float) -> tuple[DeviceSample, ...]:
    """Return a reading's devices for a line at ``t``, each with its age unless it was prompt."""
    age = t - reading.t
    if abs(age) < _PROMPT_S:
        return reading.devices
    return tuple(replace(device, age_s=round(age, 4)) for device in reading.devices)
