"""Rules about the evaluation job of a round: without vendor code, weights and steps give the reported figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from accelmark.audit.evidence import Evidence
from accelmark.results.read.reevaluation import Reevaluation
from accelmark.results.schema import Finding, finding

METRIC_TOLERANCE: Final = 0.005
"""Largest relative difference of a metric: kernels of a vendor round differently from the framework's own."""
LOSS_TOLERANCE: Final = 0.02
"""Largest mean relative difference of replayed losses, as for a case's reference curve."""


def reproduced(evidence: Evidence) -> Iterator[Finding]:
    """Check the evaluation job of each round that had one."""
    for entry in evidence.succeeded:
        if entry.reevaluation is not None:
            yield from reevaluation_findings(entry.reevaluation, entry.number)


def reevaluation_findings(found: Reevaluation, number: int) -> Iterator[Finding]:
    """Check that the final weights have the reported metrics, and that replayed steps have the reported losses."""
    if found.problem is not None:
        yield finding("warning", "reevaluation", "", f"the evaluation job did not complete: {found.problem}", number)
    for name, reported in found.reported.items() if found.metrics is not None else ():
        again = (found.metrics or {}).get(name)
        if not _close(reported, again):
            actual = f"{name}: reported {_text(reported)}, re-evaluated {_text(again)}"
            yield finding("error", "reevaluated-metric", f"equal within {METRIC_TOLERANCE:.1%}", actual, number)
    difference = replay_difference(found)
    if difference is not None and not difference <= LOSS_TOLERANCE:
        num_steps = len({step.step for step in found.steps})
        actual = f"the losses of {num_steps} replayed steps differ by {difference:.1%} on average"
        yield finding("error", "replayed-losses", f"equal within {LOSS_TOLERANCE:.0%}", actual, number)


def replay_difference(found: Reevaluation) -> float | None:
    """Return the mean relative difference of replayed losses; NaN where one is missing, None without a replay."""
    if not found.steps:
        return None
    differences = [
        abs(step.replayed - step.reported) / max(abs(step.reported), 1e-12)
        if step.replayed is not None and step.reported is not None
        else math.nan
        for step in found.steps
    ]
    return sum(differences) / len(differences)


def _close(one: float | None, two: float | None) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=METRIC_TOLERANCE, abs_tol=1e-9)


def _text(number: float | None) -> str:
    return "no finite value" if number is None else f"{number:.6g}"
