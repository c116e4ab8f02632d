"""Numbers as people read them: four digits, grouped, with the unit that keeps them short."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from accelmark.results.figures.definitions import FIGURES, FigureName

NOTHING: Final = "–"
THIN: Final = "\u202f"
"""Narrow no-break space between a number and its unit."""

_PREFIXED: Final = {"J": 10, "W": 10, "FLOP": 1, "op": 1, "op/s": 1}
"""Units that take a prefix, and how many of the larger unit it takes."""
_COUNTED: Final = frozenset({"trials", "images"})
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def digits(value: float, significant: int = 4) -> str:
    """Return a number with ``significant`` digits, thousands grouped; whole numbers from there on stay whole."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 12:
        mantissa, exponent = f"{value:.{significant - 1}e}".split("e")
        return f"{mantissa}\u00d710{_raised(int(exponent))}"
    return f"{value:,.{max(significant - 1 - size, 0)}f}".replace("-", "\u2212")


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def quantity(value: float | None, unit: str) -> str:
    """Return a value with its unit: shares as percent, long times in minutes and hours, large amounts prefixed."""
    if value is None:
        return NOTHING
    scale = scale_of(value, unit)
    number = scale.number(value)
    return f"{number}{THIN}{scale.unit}" if scale.unit else number


@final
@dataclass(frozen=True, slots=True)
class Scale:
    """The unit that a figure is shown in, and how to get there."""

    unit: str
    divisor: float
    significant: int = 4

    def number(self, value: float | None) -> str:
        """Return a value on this scale, without its unit."""
        if value is None:
            return NOTHING
        if self.unit in _COUNTED and float(value).is_integer():
            return f"{value:,.0f}"
        return digits(value / self.divisor, self.significant)


def scale_of(value: float, unit: str) -> Scale:
    """Return the scale on which ``value`` is short: rounds of one figure are shown on the scale of their mean."""
    size = abs(value)
    if unit == "ratio":
        return Scale("%", 0.01, 3)
    if unit == "s" and size >= 600:
        return Scale("min", 60) if size < 7200 else Scale("h", 3600)
    if unit == "MiB" and size >= 10 * 1024:
        return Scale("GiB", 1024)
    if unit in _PREFIXED:
        for factor, prefix in _PREFIXES:
            if size >= _PREFIXED[unit] * factor:
                return Scale(prefix + unit, factor)
    return Scale(unit, 1)


def unit_of(name: FigureName, unit: str) -> str:
    """Return the unit of a figure for a case that counts ``unit``."""
    return FIGURES[name].unit.format(unit=unit)


def figure(name: FigureName, value: float | None, unit: str) -> str:
    """Return a figure's value as people read it."""
    return quantity(value, unit_of(name, unit))


def title_of(name: FigureName, unit: str) -> str:
    """Return what a figure is called for a case that counts ``unit``."""
    return FIGURES[name].title.format(unit=unit)


def percent(value: float | None, significant: int = 2) -> str:
    """Return a share as percent."""
    return NOTHING if value is None else f"{digits(100 * value, significant)}{THIN}%"
