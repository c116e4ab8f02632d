"""The result of a search for the best settings: its trials, and the tuned settings against those as shipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from accelmark.results.figures import FigureName, format_figure
from accelmark.results.schema import CaseResult, Finding, JobState, RoundResult, Summary
from accelmark.results.statistics import relative_difference
from accelmark.spec.number_format import NOTHING, counted, digits, duration
from accelmark.spec.settings.tuning import TuningSpec

_ALLOWED: Final = ("synthetic-data", "too-few-rounds")
"""Rules whose errors do not exclude a trial: all rounds of the search have the same data, and a trial has one."""

_NOT_ENDED: Final[tuple[JobState, ...]] = ("queued", "preparing", "running", "cancelled", "lost")
"""States in which a search is in progress or can be resumed."""


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

    trials: list[Trial]
    conclusion: str
    """One sentence."""
    is_better: bool
    """Whether the tuned settings are valid over all rounds and better than those as shipped, beyond the noise."""


def is_eligible(state: JobState, findings: Iterable[Finding]) -> bool:
    """Return whether the settings of a trial can be chosen: it succeeded, and no rule makes it invalid."""
    errors = (finding for finding in findings if finding.severity == "error" and finding.rule not in _ALLOWED)
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
    if any(case.state in _NOT_ENDED for case in summary.cases):
        conclusion, is_better = "the search has not ended", False
    elif not trials and summary.tuning.budget_s is not None:
        took_s = [sum(node.duration_s for node in rounds[name].nodes) for name in shipped.rounds if name in rounds]
        conclusion = (
            f"no other settings were tried: one trial and the rounds of the comparison take "
            f"{duration(summary.tuning.num_least_rounds * max(took_s, default=0.0))}, more than the budget of "
            f"{duration(summary.tuning.budget_s)}; give a larger --budget"
        )
        return Tuned(trials, conclusion, is_better=False)
    elif tuned is None:
        conclusion, is_better = "no valid trial was better by more than 1 %; keep the settings as shipped", False
    else:
        conclusion, is_better = _comparison(shipped, tuned, rounds, summary.tuning)
    return Tuned(trials, f"{counted(len(trials), 'trial')}: {conclusion}", is_better)


def _trial(number: int, case: CaseResult, figure: FigureName) -> Trial:
    value, difference = case.mean_of(figure), case.mean_of(FigureName.METRIC_DIFFERENCE)
    is_valid = case.verdict == "VALID" and is_eligible(case.state, case.findings)
    shown = NOTHING if value is None else format_figure(figure, value, case.unit)
    metric = NOTHING if difference is None else digits(difference, 2)
    outcome = case.verdict if is_valid else next(iter(case.reasons), case.state)
    return Trial(number, case.variant or "", shown, metric, outcome)


def _comparison(
    shipped: CaseResult, tuned: CaseResult, rounds: Mapping[str, RoundResult], tuning: TuningSpec
) -> tuple[str, bool]:
    """Return the ratio of both as text, and whether the tuned settings are better: valid, with an interval beyond 1."""
    before, after = (
        [value for name in case.rounds if name in rounds if (value := rounds[name].value_of(FigureName(tuning.figure)))]
        for case in (shipped, tuned)
    )
    ratio, interval = relative_difference(before, after) if before and after else (None, None)
    if ratio is None or interval is None or not is_eligible(tuned.state, tuned.findings):
        bad, which = (tuned, "tuned") if before else (shipped, "shipped")
        why = next(iter(bad.reasons), bad.state)
        return f"the {which} settings are not valid over all rounds ({why}); keep those as shipped", False
    low, high = 1 + interval[0], 1 + interval[1]
    limits = f"(95 % interval {digits(low, 3)} to {digits(high, 3)})"
    text = f"tuned is {digits(1 + ratio, 3)} times as shipped {limits}, {len(after)} rounds each in turn"
    if tuning.better == "lower":
        low, high = -high, -low
    one = -1 if tuning.better == "lower" else 1
    if low > one:
        return text, True
    if high < one:
        return f"{text}: the settings as shipped are better", False
    longer = shipped.key.model_copy(update={"repeat": 3 * tuning.num_rounds})
    advice = f"keep the settings as shipped, or measure more rounds on an idle host: {longer}"
    return f"{text}: the interval contains 1, so no difference was shown; {advice}", False
