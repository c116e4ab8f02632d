"""Search for the highest rate at which a service level objective holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

MAX_STEPS: Final = 14
PRECISION: Final = 0.05
"""Relative distance of the highest rate that holds from the lowest that does not, at which the search ends."""

FIRST_SHARE: Final = 0.5
"""First rate of a search as a share of the highest rate of answers in the stages before."""


@final
@dataclass(frozen=True, slots=True)
class RateSearch:
    """Result of a search."""

    rate: float | None
    """Highest rate that was tried and holds; None if none does."""
    failed_rate: float | None
    """Lowest rate that was tried and does not hold; None if all do."""
    num_steps: int

    @property
    def is_converged(self) -> bool:
        """Whether both are within :data:`PRECISION` of each other."""
        return (
            self.rate is not None and self.failed_rate is not None and self.failed_rate <= self.rate * (1 + PRECISION)
        )


def search_rate(
    holds: Callable[[float], bool], first: float, least: float = 0.0, max_steps: int = MAX_STEPS
) -> RateSearch:
    """Search from ``first``: double (or halve) until the answer changes, then bisect in the logarithm.

    A rate above one that failed is never tried, nor one below one that holds, nor one below ``least``.
    """
    rate: float | None = None
    failed: float | None = None
    tried, step = first, 0
    while step < max_steps:
        step += 1
        if holds(tried):
            rate = tried
        else:
            failed = tried
        if RateSearch(rate, failed, step).is_converged or (rate is None and tried / 2 < least):
            break
        if failed is None:
            tried = 2 * tried
        elif rate is None:
            tried = tried / 2
        else:
            tried = math.sqrt(rate * failed)
    return RateSearch(rate, failed, step)
