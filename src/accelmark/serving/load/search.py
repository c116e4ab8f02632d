"""Search for the highest rate at which a service level objective holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

MAX_STEPS: Final = 14
EXPECTED_STEPS: Final = 6
"""Steps of a search whose first rate holds and second rate does not, or the other way round."""
PRECISION: Final = 0.05
"""Relative distance of the highest rate that holds from the lowest that does not, at which the search ends."""

FIRST_SHARE: Final = 0.5
"""First rate of a search as a share of the highest rate of answers in the stages before."""


@final
@dataclass(frozen=True)
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
    holds: Callable[[float, int], bool],
    first: float,
    least: float = 0.0,
    max_steps: int = MAX_STEPS,
    held: float | None = None,
) -> RateSearch:
    """Search from ``first``: double (or halve) until the answer changes, then bisect in the logarithm.

    ``holds`` gets a rate, and how many further steps are likely. No rate is tried above a failed rate, nor
    below a rate that holds, nor below ``least``. ``held`` is a rate that is known to hold: the search
    begins at twice it.
    """
    rate = held
    failed: float | None = None
    tried, step = first if held is None else 2 * held, 0
    while step < max_steps:
        step += 1
        if holds(tried, min(max_steps - step, _likely_steps(rate, failed) - 1)):
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


def _likely_steps(rate: float | None, failed: float | None) -> int:
    """Return how many steps are left, if the next one changes the answer where it has not changed yet."""
    if rate is None or failed is None:
        return EXPECTED_STEPS - (rate is not None or failed is not None)
    return math.ceil(math.log2(math.log(failed / rate) / math.log1p(PRECISION)))
