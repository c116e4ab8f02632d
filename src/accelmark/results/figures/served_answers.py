"""Compute from the records of requests whether answers are the model's own: agreement, and repeated prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from accelmark.results.figures.serving import time_per_token
from accelmark.results.read.requests import Booleans, Floats, Requests
from accelmark.results.serving_schema import AnswersCompared, PromptUse
from accelmark.spec.log.serving import Answer

MIN_REPEATED: Final = 5
"""Repeated and first uses of prompts from which their speeds are compared."""
MAX_SPEEDUP: Final = 1000.0
"""Greatest speed-up that is reported: a stored answer may take no measurable time."""


def compared_answers(
    answers: Sequence[Answer], requests: Requests, num_promised: int, min_agreement: float
) -> AnswersCompared:
    """Return the agreement of the answers with the framework's: the mean of each answer's share of agreeing tokens."""
    known = set(
        zip(
            requests.stage[requests.is_ok].tolist(),
            requests.number[requests.is_ok].tolist(),
            requests.prompt[requests.is_ok].tolist(),
            strict=True,
        )
    )
    shares = [min(answer.num_agreeing / answer.num_tokens, 1.0) for answer in answers if answer.num_tokens > 0]
    return AnswersCompared(
        num_promised=num_promised,
        num_compared=len(shares),
        agreement=sum(shares) / len(shares) if shares else None,
        worst=min(shares, default=None),
        min_agreement=min_agreement,
        num_foreign=sum((answer.stage, answer.number, answer.prompt) not in known for answer in answers),
    )


def prompt_use(requests: Requests) -> PromptUse:
    """Return how often prompts were used again, and how much faster they were then; warm-up is a use as well.

    Durations are relative to the mean of their stage, so that stages of different load are compared together.
    """
    order = np.lexsort((requests.due_s, requests.stage))
    _, first = np.unique(requests.prompt[order], return_index=True)
    again = np.ones(len(requests), dtype=np.bool_)
    again[order[first]] = False
    answered = requests.is_ok & (requests.stage >= 0) & (requests.tokens > 0) & np.isfinite(requests.first_s)
    tokens = np.where(answered, requests.tokens, 1)
    measured = requests.stage >= 0
    return PromptUse(
        num_requests=int(measured.sum()),
        num_unique=len(np.unique(requests.prompt[measured])),
        num_repeated=int((answered & again).sum()),
        e2e_speedup=_speedup((requests.end_s - requests.due_s) / tokens, answered, again, requests),
        tpot_speedup=_speedup(time_per_token(requests), answered, again, requests),
        ttft_speedup=_speedup(requests.first_s - requests.due_s, answered, again, requests),
    )


def _speedup(durations: Floats, answered: Booleans, again: Booleans, requests: Requests) -> float | None:
    """Return the median of first uses over that of repeated uses; None where there are too few."""
    relative: Floats = np.full(len(durations), np.nan)
    for stage in np.unique(requests.stage[answered]).tolist():
        here = answered & (requests.stage == stage) & np.isfinite(durations)
        if here.any() and (middle := float(durations[here].mean())) > 0:
            relative[here] = durations[here] / middle
    before, after = relative[~again & np.isfinite(relative)], relative[again & np.isfinite(relative)]
    if min(len(before), len(after)) < MIN_REPEATED:
        return None
    return min(float(np.median(before)) / max(float(np.median(after)), 1e-9), MAX_SPEEDUP)
