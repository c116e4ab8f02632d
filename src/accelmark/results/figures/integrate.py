"""Integrals over sampled columns for time-weighted means, or the reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from accelmark.results.figures.arrays import Column, Floats

GAP_INTERVALS: Final = 5.0
GAP_LEAST_S: Final = 5.0

Spans = Sequence[tuple[float, float]]
"""(begin, end) in seconds of the samples' clock."""


@final
@dataclass(frozen=True, slots=True)
class Integral:
    """An integral over time, and the mean it means; ``reason`` stands where there is none."""

    value: float | None
    mean: float | None
    reason: str | None = None


def largest_gap_s(interval_s: float) -> float:
    """Return the longest silence between samples that is bridged by a straight line."""
    return max(GAP_INTERVALS * interval_s, GAP_LEAST_S)


def integrate(t: Column, values: Column, spans: Spans, gap_s: float) -> Integral:
    """Integrate by trapezoids over ``spans``, with the ends interpolated between their neighbouring samples.

    An end without a sample beyond it takes the nearest one's value, if that is no further than ``gap_s``. NaN values
    are samples that were not taken.
    """
    import numpy as np

    times, column = np.asarray(t, dtype=np.float64), np.asarray(values, dtype=np.float64)
    kept = np.isfinite(column)
    times, column = times[kept], column[kept]
    duration = sum(end - begin for begin, end in spans)
    if not len(times):
        return Integral(None, None, "no sample holds a value")
    if duration <= 0:
        return Integral(None, None, "nothing was trained")
    total = 0.0
    for begin, end in spans:
        inside = (times > begin) & (times < end)
        grid = np.concatenate(([begin], times[inside], [end]))
        if silence := _silence(times, begin, end, gap_s):
            return Integral(None, None, silence)
        total += float(np.trapezoid(np.interp(grid, times, column), grid))
    return Integral(total, total / duration)


def _silence(points: Floats, begin: float, end: float, gap_s: float) -> str | None:
    """Tell of the first stretch of the span that is further than ``gap_s`` from one sample to the next."""
    import numpy as np

    first = max(int(np.searchsorted(points, begin, side="right")) - 1, 0)
    last = min(int(np.searchsorted(points, end, side="left")), len(points) - 1)
    around = points[first : last + 1]
    if around[0] - begin > gap_s or end - around[-1] > gap_s:
        return "telemetry does not cover the whole of training"
    gaps = np.diff(around)
    if len(gaps) and float(gaps.max()) > gap_s:
        at = float(around[int(gaps.argmax())]) - begin
        return f"telemetry is silent for {float(gaps.max()):.1f} s, {max(at, 0.0):.1f} s into training"
    return None
