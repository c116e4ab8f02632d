"""Readings of a host's clocks, taken together, so that spans by different clocks can be compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Self

from pydantic import Field

from accelmark.spec.model import Spec

_UPTIME: Final = Path("/proc/uptime")


class ClockReading(Spec):
    """The clocks of one host at one moment, in seconds."""

    wall_s: float
    """Unix time."""
    mono_s: float
    """``time.monotonic``."""
    uptime_s: float | None = None
    """First field of ``/proc/uptime``, to 10 ms: the kernel writes it, so a replaced library function does not change
    it; null where it cannot be read."""

    @classmethod
    def now(cls) -> Self:
        """Read the clocks."""
        return cls(wall_s=round(time.time(), 4), mono_s=round(time.monotonic(), 4), uptime_s=_uptime_s())

    def earlier(self, by_s: float) -> Self:
        """Return the reading of ``by_s`` seconds before."""
        uptime_s = None if self.uptime_s is None else self.uptime_s - by_s
        return self.model_copy(
            update={"wall_s": self.wall_s - by_s, "mono_s": self.mono_s - by_s, "uptime_s": uptime_s}
        )


def _uptime_s() -> float | None:
    try:
        return float(_UPTIME.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


class HostClocks(Spec):
    """Readings by the node agent of one host."""

    began: ClockReading
    """When the agent started."""
    ended: ClockReading
    """When its ranks and their remaining processes had ended."""
    seen: dict[str, tuple[ClockReading, ClockReading]] = Field(default_factory=dict)
    """Name of an event -> when the agent first and last saw it in the log of the host's first rank."""
