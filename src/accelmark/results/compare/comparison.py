"""Compare cases of two runs: whether they are comparable, and the difference of each figure with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from accelmark.results.compare.context import ContextDifference, context_differences, context_of
from accelmark.results.compare.statistics import mean_difference
from accelmark.results.figure_names import FIGURES, FigureName
from accelmark.results.schema import CaseResult, Mark, Task
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.errors import RequestError
from accelmark.spec.key import CaseKey
from accelmark.spec.model import Spec

Effect = Literal["better", "worse", "different", "within noise", "equal", "unknown"]

_SEPARATING_MARKS: Final[tuple[tuple[Mark, str, str], ...]] = (
    ("open", "open", "closed"),
    ("synthetic", "on synthetic data", "on real data"),
    ("partial", "ended early", "whole"),
    ("partial_evaluation", "evaluated on a part of the data", "evaluated on all of it"),
)
"""(mark, text with it, text without it): results with and without such a mark are not comparable."""


_TASKS: Final[dict[Task, str]] = {"train": "training", "infer": "inference", "automl": "search"}


class Difference(Spec):
    """One figure of both sides."""

    figure: FigureName
    title: str
    unit: str
    baseline: float
    other: float
    num_rounds: tuple[int, int]
    difference: float
    """other - baseline, in ``unit``."""
    interval: tuple[float, float] | None
    """95 % interval of the difference (Welch); null where a side has one round."""
    relative: float | None
    """The difference over the baseline's mean; null for a mean of 0."""
    relative_interval: tuple[float, float] | None
    """``interval`` over the baseline's mean."""
    effect: Effect
    """``unknown`` where a side has one round, and thus no interval."""


class Side(Spec):
    """One case of one run."""

    run: str
    path: str
    started_at: str
    key: CaseKey
    task: Task
    unit: str
    variant: str | None
    case_version: int | None
    verdict: str
    marks: tuple[Mark, ...]
    num_rounds: int
    """Rounds that succeeded."""


class Pair(Spec):
    """A case of the baseline and the same case of another run."""

    baseline: Side
    other: Side
    not_comparable: tuple[str, ...]
    """Why the two are not comparable, where the comparison was forced."""
    differences: tuple[Difference, ...]
    one_sided: tuple[str, ...]
    """Figures that only one side has, with the reason why the other has none."""
    differing: tuple[ContextDifference, ...]


class Comparison(Spec):
    """Every other run against the first."""

    schema_version: Literal[2] = 2
    baseline: str
    pairs: tuple[Pair, ...]
    unmatched: tuple[str, ...] = ()
    """Cases that only some runs have."""
    problems: tuple[str, ...] = ()
    """Runs and rounds that could not be read."""


def compare(
    runs: Sequence[LoadedRun], *, across_scales: bool = False, force: bool = False, problems: Iterable[str] = ()
) -> Comparison:
    """Compare each run of ``runs`` with the first.

    Args:
        runs: the baseline, then the others.
        across_scales: compare cases with different numbers of hosts or ranks.
        force: compare cases that are not comparable, and mark them.
        problems: runs that could not be read.

    Raises:
        RequestError: there are fewer than two runs, the runs have no case in common, or cases are not comparable.
    """
    if len(runs) < 2:
        unread = "".join(f"\n{problem}" for problem in problems)
        raise RequestError(f"a comparison needs two or more runs, {len(runs)} could be read{unread}")
    first, *others = runs
    pairs: list[Pair] = []
    unmatched: list[str] = []
    for other in others:
        matches = _matches(first, other)
        for number, case in enumerate(first.summary.cases):
            if number in matches:
                match = other.summary.cases[matches[number]]
                pairs.append(_pair(first, case, other, match, across_scales=across_scales))
            elif any(_same_work(case, found) for found in other.summary.cases):
                unmatched.append(f"{_name(case)}: only {first.summary.run} has it")
            else:
                unmatched.append(f"{_name(case)}: {other.summary.run} has no {case.key.model} ({_TASKS[case.task]})")
        unmatched += [
            f"{_name(case)}: only {other.summary.run} has it"
            for number, case in enumerate(other.summary.cases)
            if number not in matches.values()
        ]
    if not pairs:
        raise RequestError("the runs have no case in common:\n" + "\n".join(unmatched))
    refused = [f"{pair.other.run}: {pair.other.key}: {reason}" for pair in pairs for reason in pair.not_comparable]
    if refused and not force:
        hint = "--force compares them anyway, and marks the result"
        if not across_scales and any(" hosts x " in reason for reason in refused):
            hint = f"--across-scales compares different scales; {hint}"
        raise RequestError("\n".join(["not comparable:", *refused, hint]))
    return Comparison(
        baseline=first.summary.run, pairs=tuple(pairs), unmatched=tuple(unmatched), problems=tuple(problems)
    )


def _name(case: CaseResult) -> str:
    return f"{case.key} {case.variant}" if case.variant else str(case.key)


def _same_work(one: CaseResult, two: CaseResult) -> bool:
    return (one.key.model, one.task) == (two.key.model, two.task)


def _matches(first: LoadedRun, other: LoadedRun) -> dict[int, int]:
    """Return the case number in ``other`` for each case number in ``first``, most similar pairs first.

    Cases of the same model and task are compared by framework, scale, precision and batch size of an inference,
    variant, hardware and version of the framework, in this order.
    """

    def similarity(pair: tuple[int, int]) -> tuple[bool, ...]:
        case, found = first.summary.cases[pair[0]], other.summary.cases[pair[1]]
        one, two = case.key, found.key
        return (
            one.framework == two.framework,
            (one.nnodes, one.nproc) == (two.nnodes, two.nproc),
            _precision_and_batch(first, case) == _precision_and_batch(other, found),
            case.variant == found.variant,
            one.hardware == two.hardware,
            one.framework_version == two.framework_version,
        )

    possible = [
        (number, place)
        for number, case in enumerate(first.summary.cases)
        for place, found in enumerate(other.summary.cases)
        if _same_work(case, found)
    ]
    matches: dict[int, int] = {}
    for number, place in sorted(possible, key=similarity, reverse=True):
        if number not in matches and place not in matches.values():
            matches[number] = place
    return matches


def _precision_and_batch(run: LoadedRun, case: CaseResult) -> tuple[str, int] | None:
    """Return precision and batch size of an inference; None for other tasks, or where no round could be read."""
    found = next((result for result in run.rounds_of(case) if result.inference), None)
    return (found.precision, found.inference.batch_size) if found and found.inference else None


def _pair(first: LoadedRun, case: CaseResult, other: LoadedRun, match: CaseResult, *, across_scales: bool) -> Pair:
    sides = _side(first, case), _side(other, match)
    differences: list[Difference] = []
    one_sided: list[str] = []
    for name in FigureName:
        before, after = _values(first, case, name), _values(other, match, name)
        if before and after:
            differences.append(_difference(name, before, after, case.unit))
        elif before or after:
            without, its_case = (other, match) if before else (first, case)
            spread = its_case.figures.get(name)
            why = spread.reason if spread and spread.reason else "was not measured"
            one_sided.append(f"{FIGURES[name].title.format(unit=case.unit)}: {without.summary.run}: {why}")
    return Pair(
        baseline=sides[0],
        other=sides[1],
        not_comparable=(
            *_not_comparable(*sides, across_scales=across_scales),
            *_not_comparable_inference(_precision_and_batch(first, case), _precision_and_batch(other, match)),
        ),
        differences=tuple(differences),
        one_sided=tuple(one_sided),
        differing=context_differences(context_of(first, case), context_of(other, match)),
    )


def _side(run: LoadedRun, case: CaseResult) -> Side:
    rounds = run.rounds_of(case)
    return Side(
        run=run.summary.run,
        path=str(run.path),
        started_at=run.summary.started_at,
        key=case.key,
        task=case.task,
        unit=case.unit,
        variant=case.variant,
        case_version=rounds[0].case_version if rounds else None,
        verdict=case.verdict,
        marks=case.marks,
        num_rounds=sum(result.state == "succeeded" for result in rounds),
    )


def _not_comparable(one: Side, two: Side, *, across_scales: bool) -> Iterable[str]:
    for side in (one, two):
        if side.num_rounds == 0:
            yield f"{side.run} has no readable round that succeeded"
    if None not in (one.case_version, two.case_version) and one.case_version != two.case_version:
        yield f"version {two.case_version} of the case, baseline version {one.case_version}"
    if one.task == "automl" and one.variant != two.variant:
        yield f"search {two.variant}, baseline {one.variant}"
    if one.unit != two.unit:
        yield f"unit {two.unit}, baseline {one.unit}"
    for mark, with_it, without in _SEPARATING_MARKS:
        if (mark in one.marks) != (mark in two.marks):
            there, here = (with_it, without) if mark in two.marks else (without, with_it)
            yield f"{there}, baseline {here}"
    if not across_scales and (one.key.nnodes, one.key.nproc) != (two.key.nnodes, two.key.nproc):
        yield f"{two.key.nnodes} hosts x {two.key.nproc}, baseline {one.key.nnodes} hosts x {one.key.nproc}"


def _not_comparable_inference(one: tuple[str, int] | None, two: tuple[str, int] | None) -> Iterable[str]:
    """Yield why two inferences are not comparable; different engines are, since they are compared on purpose."""
    if one is None or two is None:
        return
    if one[0] != two[0]:
        yield f"precision {two[0]}, baseline {one[0]}"
    if one[1] != two[1]:
        yield f"batch size {two[1]}, baseline {one[1]}"


def _values(run: LoadedRun, case: CaseResult, name: FigureName) -> list[float]:
    return [
        figure.value
        for result in run.rounds_of(case)
        if result.state == "succeeded" and (figure := result.figures.get(name)) and figure.value is not None
    ]


def _difference(name: FigureName, before: Sequence[float], after: Sequence[float], unit: str) -> Difference:
    info = FIGURES[name]
    difference, interval = mean_difference(before, after)
    base = sum(before) / len(before)
    scale = abs(base)
    return Difference(
        figure=name,
        title=info.title.format(unit=unit),
        unit=info.unit.format(unit=unit),
        baseline=base,
        other=sum(after) / len(after),
        num_rounds=(len(before), len(after)),
        difference=difference,
        interval=interval,
        relative=difference / scale if scale else None,
        relative_interval=(interval[0] / scale, interval[1] / scale) if interval and scale else None,
        effect=_effect(name, difference, interval),
    )


def _effect(name: FigureName, difference: float, interval: tuple[float, float] | None) -> Effect:
    if interval is None:
        return "unknown"
    if interval == (0.0, 0.0):
        return "equal"
    if interval[0] <= 0 <= interval[1]:
        return "within noise"
    better = FIGURES[name].better
    if better == "neither":
        return "different"
    return "better" if (difference > 0) == (better == "higher") else "worse"
