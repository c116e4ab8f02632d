"""Curves for the eye: down-sampled so that peaks stay. Figures are never computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accelmark.results.schema import Point

if TYPE_CHECKING:
    from accelmark.results.figures.arrays import Floats, Indices
    from accelmark.results.figures.timeline import Timeline

MOST_POINTS: Final = 1000
HISTOGRAM_BINS: Final = 60


def thin(values: Floats, most: int = MOST_POINTS) -> Indices:
    """Return increasing indices of at most ``most`` points that keep each stretch's least and greatest value.

    Non-finite values are kept only where a whole stretch is non-finite: as one gap.
    """
    import numpy as np

    count = len(values)
    if count <= most:
        return np.arange(count)
    stretches = max((most - 2) // 2, 1)
    edges = np.linspace(1, count - 1, stretches + 1).astype(np.int64)
    low, high = edges[:-1], edges[1:]
    kept = [0, count - 1]
    lowest = np.where(np.isfinite(values), values, np.inf)
    highest = np.where(np.isfinite(values), values, -np.inf)
    for begin, end in zip(low.tolist(), high.tolist(), strict=True):
        if end > begin:
            kept.append(begin + int(lowest[begin:end].argmin()))
            kept.append(begin + int(highest[begin:end].argmax()))
    return np.unique(np.asarray(kept))


def curves_of(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> dict[str, tuple[Point, ...]]:
    """Return ``loss``, ``throughput`` (units per second of each window) and each metric over steps and time."""
    import numpy as np

    curves: dict[str, tuple[Point, ...]] = {}
    steps = np.arange(1, len(timeline.losses) + 1)
    if len(steps) and len(timeline.window_steps):
        times = np.interp(
            steps, np.concatenate(([0.0], timeline.window_steps)), np.concatenate(([0.0], timeline.window_time_s))
        )
        curves["loss"] = _points(steps, times, timeline.losses)
    if len(timeline.window_steps):
        rate = window_throughput(timeline, units_per_sample, samples_per_step)
        curves["throughput"] = _points(timeline.window_steps, timeline.window_time_s, rate)
    for timed in timeline.evaluations:
        for name, value in timed.evaluation.metrics.items():
            point = Point(step=timed.evaluation.global_steps, time_s=round(timed.time_s, 4), value=value)
            curves[name] = (*curves.get(name, ()), point)
    return curves


def window_throughput(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> Floats:
    """Return units per second of each window; a window that follows a restart counts its steps' samples."""
    import numpy as np

    trained = np.diff(timeline.window_samples, prepend=0.0)
    by_steps = timeline.window_lengths * samples_per_step
    restarted = (trained <= 0) | (trained > by_steps)
    units = np.where(restarted, by_steps, trained) * units_per_sample
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(timeline.window_wall_s > 0, units / timeline.window_wall_s, np.nan)


def _points(steps: Floats | Indices, times: Floats, values: Floats) -> tuple[Point, ...]:
    kept = thin(values)
    return tuple(
        Point(step=int(step), time_s=round(float(time), 4), value=_rounded(float(value)))
        for step, time, value in zip(steps[kept], times[kept], values[kept], strict=True)
    )


def _rounded(value: float) -> float | None:
    """Seven digits are enough for the eye; what is not finite is a gap."""
    return float(f"{value:.7g}") if value - value == 0 else None


def histogram(step_ms: Floats, bins: int = HISTOGRAM_BINS) -> tuple[tuple[float, int], ...]:
    """Return (upper edge in ms, steps) of bins of equal width up to p99.5, then one up to the slowest step.

    The first entry holds the lower edge of the first bin, with no steps. Their number follows Rice's rule, at most
    ``bins``.
    """
    import numpy as np

    if not len(step_ms):
        return ()
    low, high, slowest = float(step_ms.min()), float(np.quantile(step_ms, 0.995)), float(step_ms.max())
    if high <= low:
        return ((low, 0), (slowest, len(step_ms)))
    edges = np.linspace(low, high, min(bins, max(8, round(2 * len(step_ms) ** (1 / 3)))) + 1)
    if slowest > high:
        edges = np.append(edges, slowest)
    counts, _ = np.histogram(step_ms, bins=edges.astype(np.float64))
    rest = len(step_ms) - int(counts.sum())
    counts[-1] += rest
    return ((round(low, 4), 0), *((round(float(edge), 4), int(n)) for edge, n in zip(edges[1:], counts, strict=True)))
