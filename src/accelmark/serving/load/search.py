"""Search for the highest rate at which a service level objective holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from accelmark.spec.serving import RequestRecord, Slo

MAX_STEPS: Final = 14
PRECISION: Final = 0.05
"""Relative distance of the highest rate that holds from the lowest that does not, at which the search ends."""


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


def holds_slo(records: Sequence[RequestRecord], slo: Slo) -> bool:
    """Return whether the share ``slo.share`` of the requests was answered within all limits.

    Times count from when a request was due. TPOT is (end - first output) / (tokens - 1), with the tokens of the
    model's tokenizer, else of the server's ``usage``, else outputs.
    """
    good = sum(_is_good(record, slo) for record in records)
    return bool(records) and good >= slo.share * len(records)


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    if record.status != "ok":
        return False
    if slo.e2e_ms is not None and 1e3 * (record.end_s - record.due_s) > slo.e2e_ms:
        return False
    if record.first_s is None:  # an empty answer
        return slo.ttft_ms is None
    if slo.ttft_ms is not None and 1e3 * (record.first_s - record.due_s) > slo.ttft_ms:
        return False
    num_tokens = record.output_tokens or record.usage_output or len(record.gaps_us) + 1
    further_ms = 1e3 * (record.end_s - record.first_s)
    return slo.tpot_ms is None or num_tokens < 2 or further_ms / (num_tokens - 1) <= slo.tpot_ms
