"""Does a result count? Basic rules over the rounds of a case; the audit adds findings to the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from accelmark.results.schema import RoundResult

Verdict = Literal["VALID", "OPEN", "INVALID"]


def verdict(rounds: Sequence[RoundResult], num_wanted: int) -> tuple[Verdict, tuple[str, ...]]:
    """Return VALID, OPEN (an immutable setting was changed, else valid) or INVALID, with every reason.

    Args:
        rounds: the results there are.
        num_wanted: rounds that the run was to do.
    """
    invalid = list(dict.fromkeys(_invalid(rounds, num_wanted)))
    forced = sorted({name for result in rounds for name, setting in result.settings.items() if setting.forced})
    is_open = any("open" in result.marks for result in rounds)
    reasons = invalid
    if is_open:
        changed = f": {', '.join(forced)}" if forced else ""
        reasons = [*invalid, f"the run was declared open{changed}"]
    return ("INVALID" if invalid else "OPEN" if is_open else "VALID"), tuple(reasons)


def _invalid(rounds: Sequence[RoundResult], num_wanted: int) -> Iterable[str]:
    if not rounds:
        yield "no round left a result"
        return
    for result in rounds:
        if result.state != "succeeded":
            yield f"round {result.round} {_said(result.state)}: {result.reason}"
    if len(rounds) < num_wanted:
        yield f"{len(rounds)} of {num_wanted} rounds have a result"
    good = [result for result in rounds if result.state == "succeeded"]
    for result in good:
        yield from _round(result)
    wanted = max(result.min_rounds for result in rounds)
    if len(good) < wanted:
        yield f"{len(good)} rounds succeeded, the case wants at least {wanted}"


def _said(state: str) -> str:
    return {"lost": "was lost", "cancelled": "was cancelled", "timed_out": "timed out", "failed": "failed"}.get(
        state, f"is {state}"
    )


def _round(result: RoundResult) -> Iterable[str]:
    if result.converged is False:
        yield f"round {result.round} did not reach the target"
    if "synthetic" in result.marks:
        yield "the data was synthetic: a figure of speed only"
    if "partial_evaluation" in result.marks:
        yield "the evaluation was of a part of its data"
    for finding in result.findings:
        if finding.severity == "error" or finding.rule == "telemetry-present":
            yield f"round {result.round}: {finding.rule}: expected {finding.expected}, found {finding.actual}"
