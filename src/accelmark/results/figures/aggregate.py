"""Aggregate figures over rounds: mean, standard deviation, 95 % interval, and rounds needed for a narrow interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from accelmark.results.figure_names import FIGURES, TRAIN_FIGURES, FigureName
from accelmark.results.schema import Figure, Finding, RoundResult, Severity, Spread

_MANY_ROUNDS: Final = 100
"""Rounds from which repeating is no remedy for a wide interval."""
NARROW: Final = 0.01
"""Half-width of a narrow interval, relative to the mean."""
WARNED_FIGURES: Final = (
    FigureName.THROUGHPUT_TRAIN, FigureName.RAW_TRAIN_TIME, FigureName.TIME_TO_TARGET, FigureName.ENERGY,
    FigureName.INFERENCE_CORE, FigureName.OUTPUT_RATE,
)  # fmt: skip
"""Figures with a warning about wide intervals."""


def spread(figures: Sequence[Figure]) -> Spread:
    """Aggregate a figure over the rounds that have a value; null with a reason where none has."""
    values = [figure.value for figure in figures if figure.value is not None]
    reason = next((figure.reason for figure in figures if figure.reason), None)
    if not values:
        return Spread(mean=None, stdev=None, ci95=None, num_rounds=0, reason=reason or "no round succeeded")
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return Spread(mean=mean, stdev=None, ci95=None, num_rounds=count, reason=reason)
    stdev = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_t(count - 1) * stdev / math.sqrt(count)
    ci95, needed = (mean - half, mean + half), rounds_needed(mean, stdev)
    return Spread(mean=mean, stdev=stdev, ci95=ci95, num_rounds=count, rounds_needed=needed, reason=reason)


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def rounds_needed(mean: float, stdev: float) -> int | None:
    """Return the number of rounds for an interval within :data:`NARROW` of the mean; None for a mean of 0.

    The smallest n with t(n - 1) x stdev / sqrt(n) <= NARROW x |mean|, for the standard deviation so far.
    """
    if mean == 0:
        return None
    relative = stdev / (NARROW * abs(mean))
    count = max(2, math.floor((1.9599 * relative) ** 2))
    while student_t(count - 1) * relative > math.sqrt(count):
        count += 1
    return count


def aggregate(rounds: Sequence[RoundResult]) -> dict[FigureName, Spread]:
    """Aggregate every figure over the rounds that succeeded."""
    good = [result for result in rounds if result.state == "succeeded"]
    names = TRAIN_FIGURES
    if rounds:
        names = tuple(name for name in FigureName if any(name in result.figures for result in rounds))
    return {name: spread([result.figures[name] for result in good if name in result.figures]) for name in names}


def finding_texts(findings: Iterable[Finding], *severities: Severity) -> list[str]:
    """Return each distinct finding of these severities once, with its rounds."""
    by_text: dict[Finding, set[int | None]] = {}
    for found in findings:
        if found.severity in severities:
            by_text.setdefault(found.model_copy(update={"round": None}), set()).add(found.round)
    return [found.about(sorted(filter(None, rounds))) for found, rounds in by_text.items()]


def spread_warnings(figures: dict[FigureName, Spread]) -> list[str]:
    """Return warnings about wide intervals, and about a single round, which has no interval."""
    warnings: list[str] = []
    num_rounds = max((found.num_rounds for found in figures.values()), default=0)
    if num_rounds == 1:
        warnings.append("a single round has no interval: repeat the case; its key ends with the number of rounds")
    wide: list[str] = []
    needed = 0
    for name in WARNED_FIGURES:
        found = figures.get(name)
        half = found.relative_half95 if found is not None else None
        if found is not None and found.rounds_needed is not None and half is not None and half > NARROW:
            digits = f"{100 * half:.0f}" if half >= 0.1 else f"{100 * half:.2g}"
            of = "" if found.num_rounds == num_rounds else f" ({found.num_rounds} rounds)"
            wide.append(f"{FIGURES[name].title.lower()} ±{digits} %{of}")
            needed = max(needed, found.rounds_needed)
    if wide:
        intervals = f"wide 95 % intervals after {num_rounds} rounds: {'; '.join(wide)}"
        advice = ": reduce the noise first, by an idle host or longer rounds" if needed > _MANY_ROUNDS else ""
        warnings.append(f"{intervals}. About {needed:,} rounds are needed for 1 %{advice}")
    return warnings
