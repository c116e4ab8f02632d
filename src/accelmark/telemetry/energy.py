"""Energy over a window from sampled power, checked against the device's own counter. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from accelmark.telemetry.reading import Recording

MAX_GAP_S: Final = 3.0
"""The longest stretch between two readings over which power may be taken as linear."""
COUNTER_TOLERANCE: Final = 0.05
"""How far the trapezoids may be from the hardware counter, as a share of the counter."""

Series = Sequence[tuple[float, float]]
"""(monotonic s, value), in the order of time."""


class EnergyReason(StrEnum):
    """Why power over a window is not valid."""

    NO_POWER = "no_power"
    """There is no reading of power (and no counter) in the window."""
    EMPTY_WINDOW = "empty_window"
    START_NOT_COVERED = "start_not_covered"
    """No reading before the window's start to interpolate from."""
    END_NOT_COVERED = "end_not_covered"
    GAP_TOO_LONG = "gap_too_long"
    COUNTER_DISAGREES = "counter_disagrees"
    """Trapezoids and hardware counter differ by more than the tolerance."""
    COUNTER_WENT_BACK = "counter_went_back"
    DEVICE_MISSING = "device_missing"
    """One of several devices has no power: their sum would be of a part."""


@final
@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of one device, or of several, over a window."""

    energy_j: float | None
    """Trapezoids over power; the counter where there is no power. None where the window is not covered."""
    mean_power_w: float | None
    counter_j: float | None
    """The hardware counter's step over the window, ends interpolated."""
    method: str | None
    """``trapezoid`` or ``counter``."""
    largest_gap_s: float | None
    power_valid: bool
    reasons: tuple[EnergyReason, ...] = ()


def integrate(points: Series, start_s: float, end_s: float) -> float:
    """Return the integral of a piecewise linear curve from ``start_s`` to ``end_s``, its ends interpolated.

    ``points`` must reach from before ``start_s`` to after ``end_s``.

    Raises:
        ValueError: they do not.
    """
    inside = [(t, value) for t, value in points if start_s < t < end_s]
    curve = [(start_s, _at(points, start_s)), *inside, (end_s, _at(points, end_s))]
    return sum((after[0] - before[0]) * (before[1] + after[1]) / 2 for before, after in _pairs(curve))


def energy(
    power: Series,
    start_s: float,
    end_s: float,
    counter: Series = (),
    *,
    max_gap_s: float = MAX_GAP_S,
    tolerance: float = COUNTER_TOLERANCE,
) -> Energy:
    """Return one device's energy over a window.

    Args:
        power: power in W over monotonic time.
        start_s: the window's start, on the same clock.
        end_s: its end.
        counter: the device's cumulative energy in J, where it has such a counter.
        max_gap_s: longest stretch between readings that is allowed.
        tolerance: allowed difference from the counter, as a share of it.
    """
    if end_s <= start_s:
        return Energy(None, None, None, None, None, False, (EnergyReason.EMPTY_WINDOW,))
    counter_j, counter_reasons = _counter_step(counter, start_s, end_s, max_gap_s)
    if not power:
        # A counter alone is as good as power; its own trouble is then what is wrong.
        if not counter:
            return Energy(None, None, None, None, None, False, (EnergyReason.NO_POWER,))
        mean = None if counter_j is None else counter_j / (end_s - start_s)
        method = None if counter_j is None else "counter"
        return Energy(counter_j, mean, counter_j, method, None, not counter_reasons, counter_reasons)
    reasons = list(_coverage(power, start_s, end_s, max_gap_s))
    gap = _largest_gap(power, start_s, end_s)
    if EnergyReason.START_NOT_COVERED in reasons or EnergyReason.END_NOT_COVERED in reasons:
        return Energy(None, None, counter_j, None, gap, False, tuple(reasons))
    total = integrate(power, start_s, end_s)
    if EnergyReason.COUNTER_WENT_BACK in counter_reasons:
        reasons.append(EnergyReason.COUNTER_WENT_BACK)
    elif counter_j is not None and abs(total - counter_j) > tolerance * counter_j:
        reasons.append(EnergyReason.COUNTER_DISAGREES)
    return Energy(total, total / (end_s - start_s), counter_j, "trapezoid", gap, not reasons, tuple(reasons))


def sum_of(parts: Sequence[Energy]) -> Energy:
    """Return the energy of several devices together; of none at all it is not known."""
    if not parts:
        return Energy(None, None, None, None, None, False, (EnergyReason.NO_POWER,))
    reasons = list(dict.fromkeys(reason for part in parts for reason in part.reasons))
    known = [part.energy_j for part in parts if part.energy_j is not None]
    complete = len(known) == len(parts)
    if known and not complete:
        reasons.append(EnergyReason.DEVICE_MISSING)
    means = [part.mean_power_w for part in parts if part.mean_power_w is not None]
    counters = [part.counter_j for part in parts if part.counter_j is not None]
    gaps = [part.largest_gap_s for part in parts if part.largest_gap_s is not None]
    methods = sorted({part.method for part in parts if part.method is not None})
    return Energy(
        sum(known) if complete else None,
        sum(means) if complete and len(means) == len(parts) else None,
        sum(counters) if len(counters) == len(parts) else None,
        "+".join(methods) or None,
        max(gaps) if gaps else None,
        complete and all(part.power_valid for part in parts),
        tuple(reasons),
    )


def energy_of(
    recording: Recording, start_s: float, end_s: float, indices: Sequence[int] | None = None, **limits: float
) -> Energy:
    """Return the energy of a recording's devices over a window of monotonic time.

    A device whose power stands in another's reading (two dies on one card) is not counted again.

    Args:
        recording: one host's telemetry.
        start_s: the window's start.
        end_s: its end.
        indices: the devices that are under test; None takes all.
        limits: ``max_gap_s`` and ``tolerance`` of ``energy``.
    """
    chosen = list(recording.device_indices if indices is None else indices)
    shared = {
        int(info["index"]): int(info["power_in"])
        for info in recording.header.get("devices", ())
        if info.get("power_in") is not None
    }
    counted = list(dict.fromkeys(shared.get(index, index) for index in chosen))
    return sum_of(
        [
            energy(
                recording.device_series(index, "power_w"),
                start_s,
                end_s,
                recording.device_series(index, "energy_j"),
                **limits,
            )
            for index in counted
        ]
    )


def _counter_step(
    counter: Series, start_s: float, end_s: float, max_gap_s: float
) -> tuple[float | None, tuple[EnergyReason, ...]]:
    if not counter:
        return None, ()
    if any(after[1] < before[1] for before, after in _pairs(counter)):
        return None, (EnergyReason.COUNTER_WENT_BACK,)
    reasons = _coverage(counter, start_s, end_s, max_gap_s)
    if EnergyReason.START_NOT_COVERED in reasons or EnergyReason.END_NOT_COVERED in reasons:
        return None, reasons
    # A gap inside does not matter to a counter: it counted on.
    return _at(counter, end_s) - _at(counter, start_s), ()


def _coverage(points: Series, start_s: float, end_s: float, max_gap_s: float) -> tuple[EnergyReason, ...]:
    reasons: list[EnergyReason] = []
    if points[0][0] > start_s:
        reasons.append(EnergyReason.START_NOT_COVERED)
    if points[-1][0] < end_s:
        reasons.append(EnergyReason.END_NOT_COVERED)
    if _largest_gap(points, start_s, end_s) > max_gap_s:
        reasons.append(EnergyReason.GAP_TOO_LONG)
    return tuple(reasons)


def _largest_gap(points: Series, start_s: float, end_s: float) -> float:
    gaps = [after[0] - before[0] for before, after in _pairs(points) if after[0] > start_s and before[0] < end_s]
    return max(gaps, default=0.0)


def _at(points: Series, t: float) -> float:
    times = [time for time, _ in points]
    right = bisect.bisect_left(times, t)
    if right < len(times) and times[right] == t:
        return points[right][1]
    if right in (0, len(times)):
        raise ValueError(f"the readings do not reach to {t}")
    (t0, v0), (t1, v1) = points[right - 1], points[right]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)


def _pairs(points: Series) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return list(itertools.pairwise(points))
