"""Read host power and energy: CPU packages through RAPL, the whole host through its management controller (IPMI)."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, final

from accelmark.telemetry.tool import CommandError, run_command

POWERCAP: Final = Path("/sys/class/powercap")
_IPMI_INTERVAL_S: Final = 30.0
"""Interval of IPMI readings; a management controller responds slowly and averages over seconds."""
_IPMI_TIMEOUT_S: Final = 20.0
_DCMI: Final = re.compile(r"Instantaneous power reading:\s*(\d+(?:\.\d+)?)\s*Watts", re.IGNORECASE)
_SDR: Final = re.compile(
    r"^(?P<name>[^|]*?(?:pwr consumption|power meter|sys(?:tem)?[ _]?(?:total[ _]?)?p(?:o)?we?r|total[ _]?power"
    r"|pw consumption)[^|]*?)\s*\|\s*(?P<watts>\d+(?:\.\d+)?)\s*Watts\s*\|\s*ok\s*$",
    re.IGNORECASE,
)
_PLAUSIBLE_W: Final = (1.0, 100_000.0)


class RaplError(Exception):
    """RAPL cannot be read; the message is the reason."""


class IpmiError(Exception):
    """The management controller reports no power; the message is the reason."""


@final
class Rapl:
    """The energy counters of all CPU packages, unwrapped and summed.

    Only zones named ``package-N`` count: ``psys`` and ``dram`` would count parts twice or the whole board. A counter
    wraps at ``max_energy_range_uj``, at 300 W within minutes, so it must be read more often.

    Raises RaplError: there is no package, or a package is not readable.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0
        if not root.is_dir():
            raise RaplError(f"{root} does not exist (no RAPL here, or a virtual machine)")
        problems: list[str] = []
        for zone in sorted(root.glob("*-rapl:*")):
            try:
                if (zone / "name").read_text().startswith("package-"):
                    self._last_uj[zone / "energy_uj"] = _read_number(zone / "energy_uj")
            except (OSError, RaplError) as error:
                problems.append(str(error))
        if problems:
            # The sum over some of the packages would be wrong.
            raise RaplError("; ".join(problems))
        if not self._last_uj:
            raise RaplError(f"{root} lists no CPU package")

    @property
    def num_packages(self) -> int:
        """Number of packages that are read."""
        return len(self._last_uj)

    def energy_j(self) -> float:
        """Return the energy of all packages in J since this object was created; raises RaplError if it is unknown."""
        for counter, last in self._last_uj.items():
            now = _read_number(counter)
            wrapped = _read_number(counter.with_name("max_energy_range_uj")) if now < last else 0
            self._total_uj += now - last + wrapped
            self._last_uj[counter] = now
        return self._total_uj / 1e6


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise RaplError(f"{path} is readable by root only") from error
    except (OSError, ValueError) as error:
        raise RaplError(f"{path} cannot be read: {error}") from error


def parse_dcmi(text: str) -> float:
    """Return the power in W from ``ipmitool dcmi power reading``; raises IpmiError if it has no plausible reading."""
    match = _DCMI.search(text)
    if match is None:
        raise IpmiError("ipmitool dcmi reports no instantaneous power reading")
    return _plausible(float(match[1]))


def parse_sdr(text: str) -> float:
    """Return the power in W of the one sensor for the whole system in ``ipmitool sdr``; raises IpmiError otherwise."""
    readings = {float(match["watts"]) for line in text.splitlines() if (match := _SDR.match(line.strip()))}
    if len(readings) != 1:
        problem = "no sensor" if not readings else f"{len(readings)} sensors with different values"
        raise IpmiError(f"ipmitool sdr lists {problem} for the power of the whole system")
    return _plausible(readings.pop())


def _plausible(power_w: float) -> float:
    if not _PLAUSIBLE_W[0] <= power_w <= _PLAUSIBLE_W[1]:
        raise IpmiError(f"the management controller reports {power_w:g} W, which is implausible")
    return power_w


def read_ipmi_power_w(tool: str = "ipmitool") -> float:
    """Read the host's power in W by DCMI, else by its sensors, in seconds; raises IpmiError with the reasons."""
    if shutil.which(tool) is None:
        raise IpmiError(f"{tool} is not installed")
    try:
        return parse_dcmi(run_command([tool, "dcmi", "power", "reading"], _IPMI_TIMEOUT_S))
    except (CommandError, IpmiError) as first:
        try:
            return parse_sdr(run_command([tool, "sdr"], _IPMI_TIMEOUT_S))
        except (CommandError, IpmiError) as second:
            raise IpmiError(f"{first}; {second}") from second


@final
class IpmiPower:
    """Reads power in a separate thread, since the controller is slow."""

    def __init__(self) -> None:
        self.reason = None if shutil.which("ipmitool") else "ipmitool is not installed"
        """Why there is no power reading, or None."""
        self._fresh: deque[float] = deque(maxlen=1)
        if self.reason is None:
            threading.Thread(target=self._refresh, daemon=True, name="ipmi").start()

    def take(self) -> float | None:
        """Return the latest reading in W if it was not returned before, else None."""
        try:
            return self._fresh.pop()
        except IndexError:
            return None

    def _refresh(self) -> None:
        while True:
            try:
                self._fresh.append(read_ipmi_power_w())
                self.reason = None
            except IpmiError as error:
                self.reason = str(error)
            time.sleep(_IPMI_INTERVAL_S)
