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
"""States with which a search goes on, or can be continued."""


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
    is_better: bool
    """Whether the tuned settings are valid over all rounds and better than those as shipped, beyond the noise."""


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
    if any(case.state in _NOT_ENDED for case in summary.cases):
        conclusion, is_better = "the search has not ended", False
    elif not trials and summary.tuning.budget_s is not None:
        conclusion = _untried(summary.tuning, summary.tuning.budget_s, shipped, rounds)
        return Tuned(shipped, tuned, trials, conclusion, is_better=False)
    elif tuned is None:
        barred = sum(not is_eligible(case.state, case.findings) for case in by_role.get("trial", ()))
        conclusion = "none was better than the settings as shipped by more than 1 %, which are the tuned ones"
        if barred == len(trials):
            conclusion = "none can be chosen, for the reasons in its outcome; the tuned settings are those as shipped"
        elif barred:
            conclusion += f"; {barred} cannot be chosen"
        is_better = False
    else:
        conclusion, is_better = _comparison(shipped, tuned, rounds, summary.tuning)
    return Tuned(shipped, tuned, trials, f"{counted(len(trials), 'trial')}: {conclusion}", is_better)


def _trial(number: int, case: CaseResult, figure: FigureName) -> Trial:
    value, difference = case.mean_of(figure), case.mean_of(FigureName.METRIC_DIFFERENCE)
    eligible = is_eligible(case.state, case.findings)
    return Trial(
        number,
        case.variant or "",
        NOTHING if value is None else format_figure(figure, value, case.unit),
        NOTHING if difference is None else digits(difference, 2),
        case.verdict if eligible and case.verdict == "VALID" else _why(case),
    )


def _untried(tuning: TuningSpec, budget_s: float, shipped: CaseResult, rounds: Mapping[str, RoundResult]) -> str:
    took_s = [sum(node.duration_s for node in rounds[name].nodes) for name in shipped.rounds if name in rounds]
    longest_s = max(took_s, default=0.0)
    return (
        f"no other settings were tried: with rounds of {duration(longest_s)}, one trial and the "
        f"{2 * tuning.num_rounds} rounds of the comparison take {duration(tuning.num_least_rounds * longest_s)}, and "
        f"the budget was {duration(budget_s)}, which limits trials only: the rounds as shipped took "
        f"{duration(sum(took_s))}; give a larger --budget"
    )


def _comparison(
    shipped: CaseResult, tuned: CaseResult, rounds: Mapping[str, RoundResult], tuning: TuningSpec
) -> tuple[str, bool]:
    """Return the ratio of both as text, and whether the tuned settings are better: valid, with an interval beyond 1."""
    before, after = (
        [value for name in case.rounds if name in rounds if (value := rounds[name].value_of(FigureName(tuning.figure)))]
        for case in (shipped, tuned)
    )
    if not is_eligible(tuned.state, tuned.findings):
        return f"the tuned settings are not valid over all rounds ({_why(tuned)}); keep those as shipped", False
    if not after:
        return "no round of the tuned settings was measured; keep those as shipped", False
    if not before:
        return "the tuned settings cannot be compared with those as shipped, of which no round succeeded", True
    ratio, interval = relative_difference(before, after)
    if ratio is None or interval is None:
        return "the tuned settings cannot be compared with those as shipped: too few rounds succeeded", False
    low, high = 1 + interval[0], 1 + interval[1]
    text = (
        f"tuned is {digits(1 + ratio, 3)} times as shipped (95 % interval {digits(low, 3)} to {digits(high, 3)}), "
        f"{len(after)} rounds each in turn"
    )
    if (high < 1) if tuning.better == "lower" else (low > 1):
        return text, True
    if (low > 1) if tuning.better == "lower" else (high < 1):
        return f"{text}: the settings as shipped are better", False
    longer = shipped.key.model_copy(update={"repeat": 3 * tuning.num_rounds})
    return (
        f"{text}: the interval contains 1, so no difference was shown; keep the settings as shipped, or measure more "
        f"rounds on an idle host: {longer}",
        False,
    )


def _why(case: CaseResult) -> str:
    return next(iter(case.reasons), case.state)
