"""What the results room asks of whoever judges a case: the audit does, and nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, final

from accelmark.results.schema import AdaptationCost, Finding, RoundResult

Verdict = Literal["VALID", "OPEN", "INVALID"]


@final
@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the result of a case counts, and why."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Every reason why it is not VALID."""
    findings: tuple[Finding, ...]
    adaptation: AdaptationCost | None


class Judge(Protocol):
    """Decides on one case of a run."""

    def __call__(self, run_dir: Path, rounds: Mapping[str, RoundResult], num_wanted: int) -> Judgement:
        """Judge the ``rounds`` (directory relative to the run -> result) of one key.

        Args:
            run_dir: the run, for the records beside the results.
            rounds: the results there are.
            num_wanted: rounds that the run was to do.
        """
        ...
