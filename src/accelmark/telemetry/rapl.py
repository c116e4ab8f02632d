"""Energy of CPU packages through the powercap interface (RAPL), where this user may read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

POWERCAP: Final = Path("/sys/class/powercap")


class RaplError(Exception):
    """No package's energy can be read; the message is the reason."""


@final
@dataclass(slots=True)
class _Package:
    energy: Path
    range_uj: int | None
    last_uj: int
    total_uj: int = 0

    def advance(self) -> None:
        now = _number(self.energy)
        step = now - self.last_uj
        if step < 0:
            if self.range_uj is None:
                raise RaplError(f"{self.energy} went back and its range is not known")
            step += self.range_uj
        self.last_uj = now
        self.total_uj += step


@final
class Rapl:
    """The energy counters of all packages, unwrapped and summed.

    Only zones named ``package-N`` count: ``psys`` and ``dram`` would count parts twice or the whole board.
    A counter wraps at ``max_energy_range_uj``; at 300 W that takes minutes, so it must be read oftener than that.

    Raises:
        RaplError: there is no package, or none may be read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._packages = _packages(root)

    @property
    def num_packages(self) -> int:
        """Number of packages that are read."""
        return len(self._packages)

    def energy_j(self) -> float:
        """Return the energy of all packages in J since this object was made.

        Raises:
            RaplError: a counter can no longer be read.
        """
        for package in self._packages:
            package.advance()
        return sum(package.total_uj for package in self._packages) / 1e6


def _packages(root: Path) -> list[_Package]:
    if not root.is_dir():
        raise RaplError(f"{root} does not exist (no RAPL here, or a virtual machine)")
    found: list[_Package] = []
    refused: list[str] = []
    for zone in sorted(root.glob("*-rapl:*")):
        name = zone / "name"
        try:
            if not name.read_text().strip().startswith("package-"):
                continue
            energy = zone / "energy_uj"
            found.append(_Package(energy, _range(zone), _number(energy)))
        except PermissionError:
            refused.append(f"{zone}/energy_uj may be read by root only")
        except (OSError, ValueError, RaplError) as error:
            refused.append(f"{zone}: {error}")
    if refused:
        # A sum over some of the packages would be a wrong number, not a smaller one.
        raise RaplError("; ".join(refused))
    if not found:
        raise RaplError(f"{root} names no CPU package")
    return found


def _range(zone: Path) -> int | None:
    try:
        return _number(zone / "max_energy_range_uj")
    except RaplError:
        return None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise RaplError(f"{path} cannot be read: {error}") from error
