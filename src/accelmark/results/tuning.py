"""The result of a search for the best settings: its trials, and the tuned settings against those as shipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from accelmark.results.compare.statistics import relative_difference
from accelmark.results.figure_names import FigureName, format_figure
from accelmark.results.schema import CaseResult, Finding, JobState, RoundResult, Summary
from accelmark.spec.number_format import NOTHING, counted, digits, duration
from accelmark.spec.settings.tuning import TuningSpec

_ALLOWED: Final = ("real-data", "enough-rounds")
"""Rules whose errors do not exclude a trial: all rounds of the search have the same data, and a trial has one."""


class Trial(NamedTuple):
    """One trial, with its settings as text."""

    number: int
    settings: str
    figure: str
    metric: str
    """Accuracy in the engine less that in the framework."""
    outcome: str
    """Verdict, or why the settings cannot be chosen."""


class Tuned(NamedTuple):
    """The result of a search."""

    shipped: CaseResult
    tuned: CaseResult | None
    """None where no trial was better, or the search did not end."""
    trials: list[Trial]
    conclusion: str
    """One sentence."""


def is_eligible(state: JobState, findings: Iterable[Finding]) -> bool:
    """Return whether the settings of a trial can be chosen: it succeeded, and no rule makes it invalid."""
    errors = (found for found in findings if found.severity == "error" and found.rule not in _ALLOWED)
    return state == "succeeded" and next(errors, None) is None


def tuned_result(summary: Summary, rounds: Mapping[str, RoundResult]) -> Tuned | None:
    """Return the result of a run's search; None for other runs."""
    by_role: dict[str | None, list[CaseResult]] = {}
    for case in summary.cases:
        by_role.setdefault(case.role, []).append(case)
    if summary.tuning is None or "as shipped" not in by_role:
        return None
    figure = FigureName(summary.tuning.figure)
    shipped, tuned = by_role["as shipped"][0], next(iter(by_role.get("tuned", ())), None)
    trials = [_trial(number, case, figure) for number, case in enumerate(by_role.get("trial", ()), start=1)]
    if not trials and summary.tuning.budget_s is not None:
        return Tuned(shipped, tuned, trials, _untried(summary.tuning, summary.tuning.budget_s, shipped, rounds))
    return Tuned(shipped, tuned, trials, _conclusion(shipped, tuned, rounds, figure, len(trials)))


def is_worth_writing(found: Tuned, figure: FigureName, *, lower: bool) -> bool:
    """Return whether the tuned settings are valid and better than those as shipped, over all rounds."""
    if found.tuned is None or not is_eligible(found.tuned.state, found.tuned.findings):
        return False
    before, after = found.shipped.mean_of(figure), found.tuned.mean_of(figure)
    return before is None or (after is not None and (after < before) == lower and after != before)


def _trial(number: int, case: CaseResult, figure: FigureName) -> Trial:
    value, difference = case.mean_of(figure), case.mean_of(FigureName.METRIC_DIFFERENCE)
    eligible = is_eligible(case.state, case.findings)
    why = next(iter(case.reasons), case.state)
    return Trial(
        number,
        case.variant or "",
        NOTHING if value is None else format_figure(figure, value, case.unit),
        NOTHING if difference is None else digits(difference, 2),
        case.verdict if eligible and case.verdict == "VALID" else why,
    )


def _untried(tuning: TuningSpec, budget_s: float, shipped: CaseResult, rounds: Mapping[str, RoundResult]) -> str:
    took_s = [sum(node.duration_s for node in rounds[name].nodes) for name in shipped.rounds if name in rounds]
    longest_s = max(took_s, default=0.0)
    return (
        f"no other settings were tried: with rounds of {duration(longest_s)}, one trial and the "
        f"{2 * tuning.num_rounds} rounds of the comparison take {duration(tuning.num_least_rounds * longest_s)}, and "
        f"the budget was {duration(budget_s)}; give a larger --budget"
    )


def _conclusion(
    shipped: CaseResult, tuned: CaseResult | None, rounds: Mapping[str, RoundResult], figure: FigureName, num: int
) -> str:
    tried = counted(num, "trial")
    if tuned is None:
        return f"{tried}: none was better than the settings as shipped by more than 1 %, which are the tuned ones"
    before, after = (
        [value for name in case.rounds if name in rounds if (value := rounds[name].value_of(figure)) is not None]
        for case in (shipped, tuned)
    )
    if not before or not after:
        return f"{tried}: the tuned settings cannot be compared with those as shipped, of which no round succeeded"
    ratio, interval = relative_difference(before, after)
    if ratio is None:
        return tried
    wide = f" (95 % interval {digits(1 + interval[0], 3)} to {digits(1 + interval[1], 3)})" if interval else ""
    return f"{tried}: tuned is {digits(1 + ratio, 3)} times as shipped{wide}, {len(after)} rounds each in turn"
