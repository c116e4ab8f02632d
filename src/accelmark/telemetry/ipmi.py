"""Power of the whole host as its management controller tells, through ``ipmitool``."""

from __future__ import annotations

import re
import shutil
import threading
from typing import Final, final

from accelmark.telemetry.command import CommandError, run_command

READ_EVERY_S: Final = 30.0
"""A controller answers slowly and averages for seconds: asking oftener only costs."""
_TIMEOUT_S: Final = 20.0
_DCMI: Final = re.compile(r"Instantaneous power reading:\s*(\d+(?:\.\d+)?)\s*Watts", re.IGNORECASE)
_SDR: Final = re.compile(
    r"^(?P<name>[^|]*?(?:pwr consumption|power meter|sys(?:tem)?[ _]?(?:total[ _]?)?p(?:o)?we?r|total[ _]?power"
    r"|pw consumption)[^|]*?)\s*\|\s*(?P<watts>\d+(?:\.\d+)?)\s*Watts\s*\|\s*ok\s*$",
    re.IGNORECASE,
)
_PLAUSIBLE_W: Final = (1.0, 100_000.0)


class IpmiError(Exception):
    """The controller gives no power; the message is the reason."""


def parse_dcmi(text: str) -> float:
    """Return the power in W from ``ipmitool dcmi power reading``.

    Raises:
        IpmiError: it is not in the text, or is not plausible.
    """
    found = _DCMI.search(text)
    if found is None:
        raise IpmiError("ipmitool dcmi gives no instantaneous power reading")
    return _plausible(float(found[1]))


def parse_sdr(text: str) -> float:
    """Return the power in W from ``ipmitool sdr``: the one sensor that stands for the whole system.

    Raises:
        IpmiError: there is none, or several differ.
    """
    found = {float(match["watts"]) for line in text.splitlines() if (match := _SDR.match(line.strip()))}
    if len(found) != 1:
        what = "no sensor" if not found else f"{len(found)} sensors that differ"
        raise IpmiError(f"ipmitool sdr shows {what} for the power of the whole system")
    return _plausible(found.pop())


def _plausible(power_w: float) -> float:
    if not _PLAUSIBLE_W[0] <= power_w <= _PLAUSIBLE_W[1]:
        raise IpmiError(f"the controller gives {power_w:g} W, which is not plausible")
    return power_w


def read_power_w(tool: str = "ipmitool") -> float:
    """Ask the controller once, by DCMI, then by its sensors. Takes seconds.

    Raises:
        IpmiError: no power; the message is the reason.
    """
    if shutil.which(tool) is None:
        raise IpmiError(f"{tool} is not installed")
    try:
        return parse_dcmi(run_command([tool, "dcmi", "power", "reading"], _TIMEOUT_S))
    except (CommandError, IpmiError) as first:
        try:
            return parse_sdr(run_command([tool, "sdr"], _TIMEOUT_S))
        except (CommandError, IpmiError) as second:
            raise IpmiError(f"{first}; {second}") from second


@final
class IpmiPower:
    """The newest reading, renewed by a thread of its own, so that a slow controller delays nothing."""

    def __init__(self, tool: str = "ipmitool", every_s: float = READ_EVERY_S) -> None:
        self._tool = tool
        self._every_s = every_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fresh: float | None = None
        self._reason: str | None = None if shutil.which(tool) else f"{tool} is not installed"
        self._thread: threading.Thread | None = None
        if self._reason is None:
            self._thread = threading.Thread(target=self._renew, daemon=True, name="ipmi")
            self._thread.start()

    @property
    def reason(self) -> str | None:
        """Why there is no power, or None."""
        with self._lock:
            return self._reason

    def take(self) -> float | None:
        """Return a reading that was not returned before, in W; each stands in one sample only."""
        with self._lock:
            fresh, self._fresh = self._fresh, None
            return fresh

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _renew(self) -> None:
        while not self._stop.is_set():
            try:
                power = read_power_w(self._tool)
                with self._lock:
                    self._fresh, self._reason = power, None
            except IpmiError as error:
                with self._lock:
                    self._reason = str(error)
            self._stop.wait(self._every_s)
