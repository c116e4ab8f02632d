"""Numbers as people read them, in few characters."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Return ``8 s``, ``2 m 05 s`` or ``3 h 04 m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def count(number: float) -> str:
    """Return a rate or a count with thousands apart: ``12 345``, ``1.24``, ``0.0123``."""
    if abs(number) >= 1000:
        return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def percent(ratio: float) -> str:
    """Return ``93 %``."""
    return f"{100 * ratio:.0f} %"


def memory(mib: float) -> str:
    """Return ``512 MiB`` or ``34.1 GiB``."""
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def spark(values: list[float], width: int) -> str:
    """Return the values as a line of blocks, each block the mean of its share of them."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
