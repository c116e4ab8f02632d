"""Format values for terminals, pages and tables: the only number formatter; read durations; make text printable."""

from __future__ import annotations

import math
import re
from typing import Any, Final, NamedTuple

NOTHING: Final = "–"
"""Placeholder for a value that was not measured."""
THIN: Final = "\u202f"
"""Narrow no-break space between a number and its unit."""

_PREFIXES: Final = (
    (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"),
    (1e-9, "n"),
)  # fmt: skip
_PREFIXED: Final[dict[str, tuple[float, float, float]]] = {
    "J": (1e-9, 1e18, 10), "W": (1e-9, 1e18, 10), "s": (1e-9, 1, 1), "FLOP": (1, 1e18, 1), "OP": (1, 1e18, 1),
    "FLOP/s": (1, 1e18, 1), "OP/s": (1, 1e18, 1), "B/s": (1, 1e18, 1),
}  # fmt: skip
"""Base unit -> smallest and largest prefix factor, and the smallest prefixed value that is shown."""
DURATION: Final = r"(\d+(?:\.\d+)?)\s*([smhd])"
"""A regular expression for a duration as users write it: ``10m``."""
_LARGEST_RATIO: Final = 1e6


def digits(value: float, significant: int = 4) -> str:
    """Return a number with ``significant`` digits and grouped thousands; integer digits are never dropped."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    size = _exponent(value, significant)
    if size < -4 or size >= 12:
        mantissa = f"{value:.{significant - 1}e}".partition("e")[0]
        superscript = str(size).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{mantissa}\u00d710{superscript}".replace("-", "\u2212")
    return f"{value:,.{max(significant - 1 - size, 0)}f}".replace("-", "\u2212")


def quantity(value: float | None, unit: str, significant: int = 4) -> str:
    """Return a value with its unit, scaled by :func:`scale_of`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    scale = scale_of(value, unit, significant)
    number = scale.number(value)
    return f"{number}{THIN}{scale.unit}" if scale.unit else number


def subtracted(first: float, second: float) -> tuple[str, str, str]:
    """Return two numbers and their difference as shown, with as many decimals as show it in two digits."""
    decimals = max(_decimals(max(abs(first), abs(second)), 4), _decimals(first - second, 2))
    if decimals > 6:
        return digits(first), digits(second), digits(first - second, 2)
    rounded = round(first, decimals) - round(second, decimals)
    shown = (f"{value:,.{decimals}f}".replace("-", "\u2212") for value in (first, second, rounded))
    return next(shown), next(shown), next(shown) if rounded else "0"


def _decimals(value: float, significant: int) -> int:
    """Return the decimals that show ``value`` with ``significant`` digits."""
    return max(significant - 1 - _exponent(value, significant), 0) if value else 0


def _exponent(value: float, significant: int) -> int:
    """Return the exponent of the rounded number: 9.9996 has four digits as 10.00."""
    return int(f"{value:.{significant - 1}e}".partition("e")[2])


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 setting``, ``0 settings``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(value: float | None, significant: int = 2) -> str:
    """Return a ratio as a percentage; 0.001 % is the smallest that is shown, 100,000,000 % the largest."""
    if value is not None and abs(value) > _LARGEST_RATIO:
        return f">{THIN}{100 * _LARGEST_RATIO:,.0f}{THIN}%"
    if value is not None and 0 < abs(value) < 1e-5:
        return f"<{THIN}0.001{THIN}%"
    return NOTHING if value is None else f"{digits(100 * value, significant)}{THIN}%"


def limit_percent(ratio: float) -> str:
    """Return a limit as a percentage, without digits that it does not have: ``2 %`` or ``0.5 %``."""
    return f"{100 * ratio:g}{THIN}%"


def signed_percent(ratio: float) -> str:
    """Return a difference as a percentage with its sign: one decimal from 1 % on, two digits below."""
    size = abs(100 * ratio)
    if ratio > _LARGEST_RATIO:
        return f">{THIN}+{100 * _LARGEST_RATIO:,.0f}{THIN}%"
    if size < 1e-9:  # from the rounding of double precision
        return f"0{THIN}%"
    sign = "+" if ratio > 0 else "\u2212"
    return f"{sign}{size:,.1f}{THIN}%" if size >= 1 else f"{sign}{digits(size, 2)}{THIN}%"


def duration(seconds: float) -> str:
    """Return an elapsed or remaining time in whole seconds: ``8 s``, ``2 m 05 s`` or ``3 h 04 m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def duration_s(value: Any) -> Any:
    """Return ``12h``, ``90m``, ``1.5h`` or ``3600s`` in seconds; a bare number is returned unchanged (seconds)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(DURATION, value.strip())
    if match is None:
        raise ValueError("is not a duration: write for example 90s, 10m, 1.5h or 2d")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


class Scale(NamedTuple):
    """A unit to show values in, and the divisor that converts to it."""

    unit: str
    divisor: float
    significant: int = 4

    def number(self, value: float | None) -> str:
        """Return a value on this scale, without its unit."""
        if value is None:
            return NOTHING
        if self.unit in ("trials", "images") and float(value).is_integer():
            return f"{value:,.0f}"
        return digits(value / self.divisor, self.significant)


def scale_of(value: float, unit: str, significant: int = 4) -> Scale:
    """Return the scale that shows ``value`` in few digits: with a prefix, as a percentage, or in minutes or hours."""
    size = abs(value)
    if unit == "ratio":
        return Scale("%", 0.01, min(significant, 3))
    if unit == "s" and size >= 600:
        return Scale("min", 60, significant) if size < 7200 else Scale("h", 3600, significant)
    if unit == "MiB" and size >= 10 * 1024:
        return Scale("GiB", 1024, significant)
    if unit == "MiB" and 0 < size < 1:
        return Scale("KiB", 1 / 1024, significant)
    exponents = {"T": 1e12, "G": 1e9, "m": 1e-3}
    base, given = (unit, 1.0) if unit in _PREFIXED else (unit[1:], exponents.get(unit[:1], 1.0))
    if base in _PREFIXED and size:
        least, most, count = _PREFIXED[base]
        for factor, prefix in _PREFIXES:
            if least <= factor <= most and (size * given >= factor * (count if factor > 1 else 1) or factor == least):
                return Scale(prefix + base, factor / given, significant)
    return Scale(unit, 1, significant)


_REORDERING: Final = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in _REORDERING
}
"""Control characters and bidirectional formatting characters to their escapes."""


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, which a terminal would otherwise interpret."""
    return text.translate(_ESCAPES)
