"""Compute a device's energy over a window from its energy counter and integrated power."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

from accelmark.spec.backports import StrEnum, pairwise

MAX_GAP_S: Final = 3.0
"""Longest interval between two readings over which power is interpolated."""
TOLERANCE: Final = 0.05
"""Allowed difference between integrated power and the counter, as a share of the counter."""

Series = Sequence[tuple[float, float]]
"""(monotonic s, value), sorted by time."""


class EnergyReason(StrEnum):
    """Why the energy of a window is unknown or doubtful."""

    NO_POWER = "no_power"
    EMPTY_WINDOW = "empty_window"
    START_NOT_COVERED = "start_not_covered"
    END_NOT_COVERED = "end_not_covered"
    GAP_TOO_LONG = "gap_too_long"
    COUNTER_DISAGREES = "counter_disagrees"
    COUNTER_WENT_BACK = "counter_went_back"


@final
@dataclass(frozen=True)
class Energy:
    """Energy of one device over a window."""

    energy_j: float | None
    """From the counter if available, else from integrated power; None if neither covers the window."""
    method: Literal["counter", "trapezoid"] | None
    reasons: tuple[EnergyReason, ...] = ()


def energy(
    power: Series,
    start_s: float,
    end_s: float,
    counter: Series = (),
    *,
    max_gap_s: float = MAX_GAP_S,
) -> Energy:
    """Return one device's energy over a window, from power in W and its energy counter in J over monotonic time.

    The counter is preferred, because instantaneous power sampled at 1 s aliases with shorter training steps.
    """
    if end_s <= start_s:
        return Energy(None, None, (EnergyReason.EMPTY_WINDOW,))
    if not power and not counter:
        return Energy(None, None, (EnergyReason.NO_POWER,))
    integrated_j: float | None = None
    reasons = _not_covered(power, start_s, end_s)
    if power and not reasons:
        gaps = (t1 - t0 for (t0, _), (t1, _) in pairwise(power) if t1 > start_s and t0 < end_s)
        reasons = (EnergyReason.GAP_TOO_LONG,) if max(gaps, default=0.0) > max_gap_s else ()
        integrated_j = integrate(power, start_s, end_s)
    went_back = any(after < before for (_, before), (_, after) in pairwise(counter))
    problems = (EnergyReason.COUNTER_WENT_BACK,) if went_back else _not_covered(counter, start_s, end_s)
    if counter and not problems:  # gaps in the readings of a counter have no effect
        counter_j = _at(counter, end_s) - _at(counter, start_s)
        differs = integrated_j is not None and abs(integrated_j - counter_j) > TOLERANCE * counter_j
        return Energy(counter_j, "counter", (EnergyReason.COUNTER_DISAGREES,) if differs and not reasons else ())
    if not power:
        return Energy(None, None, problems)
    method: Literal["trapezoid"] | None = None if integrated_j is None else "trapezoid"
    return Energy(integrated_j, method, (*reasons, *(problems if went_back else ())))


def integrate(points: Series, start_s: float, end_s: float) -> float:
    """Return the integral of a piecewise linear curve, interpolated at both ends, which its points must cover."""
    inside = [(t, value) for t, value in points if start_s < t < end_s]
    curve = [(start_s, _at(points, start_s)), *inside, (end_s, _at(points, end_s))]
    return sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(curve))


def _not_covered(points: Series, start_s: float, end_s: float) -> tuple[EnergyReason, ...]:
    starts = (EnergyReason.START_NOT_COVERED,) if points and points[0][0] > start_s else ()
    return (*starts, EnergyReason.END_NOT_COVERED) if points and points[-1][0] < end_s else starts


def _at(points: Series, t: float) -> float:
    right = bisect.bisect_left(points, (t,))
    if right < len(points) and points[right][0] == t:
        return points[right][1]
    if right in (0, len(points)):
        raise ValueError(f"the readings do not cover {t} s")
    (t0, v0), (t1, v1) = points[right - 1], points[right]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)
