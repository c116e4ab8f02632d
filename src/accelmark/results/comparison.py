"""Compare cases of two runs: whether they are comparable, the difference of each figure, and what else differs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, get_args

from accelmark.results.figures import FigureName, in_groups, title_of, unit_of
from accelmark.results.prices import units_per_epoch
from accelmark.results.read.round_dir import planned_jobs
from accelmark.results.schema import AdaptationCost, Mark, Quantile, RoundResult, Task
from accelmark.results.sources import unmarked
from accelmark.results.statistics import mean_difference, relative_difference
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.spec.errors import RequestError
from accelmark.spec.key import CaseKey
from accelmark.spec.model import Spec
from accelmark.spec.number_format import counted
from accelmark.spec.plugins.catalog import folders, load_framework

Area = Literal["hardware", "software", "settings", "source", "audit"]
ABSENT: Final = "–"
_HOST: Final[dict[Area, tuple[str, ...]]] = {
    "hardware": ("cpu", "memory", "devices", "architecture", "cgroup", "memory_total_mib"),
    "software": ("os", "kernel", "python", "drivers", "environment", "virtualisation", "container", "accelmark"),
}
_IGNORED: Final = frozenset({
    "uuid", "bus_id", "serial", "pid", "schema_version", "ACCELMARK_NODE_DIR", "ACCELMARK_RUN", "ACCELMARK_CACHE",
})  # fmt: skip
"""Parts of a host's description that differ between any two runs, or between two cards of the same model."""
_NAMES: Final[dict[str, tuple[Area, str]]] = {
    "device_name": ("hardware", "device"), "world_size": ("hardware", "ranks"), "framework": ("software", "framework"),
    "framework_version": ("software", "framework version"), "model_class": ("source", "model class"),
    "optimizer_class": ("source", "optimizer class"), "parameter_hash": ("source", "structure of the model"),
    "checkpoint_hash": ("source", "initial weights"),
}  # fmt: skip


class ContextDifference(Spec):
    """What differs between the sides: a value, several where it varies over rounds or hosts, or none."""

    area: Area
    name: str
    baseline: tuple[str, ...]
    other: tuple[str, ...]


def _context_of(case: LoadedCase) -> dict[tuple[Area, str], tuple[str, ...]]:
    context: dict[tuple[Area, str], dict[str, None]] = {}
    for area, name, value in (*_of_run(case), *(entry for result in case.rounds for entry in _of_round(result))):
        context.setdefault((area, name), {})[value] = None
    return {key: tuple(values) for key, values in context.items()}


def _of_run(case: LoadedCase) -> Iterable[tuple[Area, str, str]]:
    key, plan = case.result.key, case.run.files.json("plan.json")
    yield "software", "AccelMark", case.run.summary.accelmark_version
    yield "hardware", "scale", f"{key.nnodes}x{key.nproc}"
    for name, title in (("source_sha256", "AccelMark's files"), ("vendor_sha256", "files of the vendor")):
        if isinstance(plan.get(name), str):
            yield "source", title, _short(plan[name])
    for job in (job for directory, job in planned_jobs(plan).items() if directory in case.result.rounds):
        for name, title in (("case", "files of the case"), ("extern", "files of the vendor for the case")):
            folder = job.get(name)
            if isinstance(folder, dict) and isinstance(folder.get("sha256"), str):
                yield "source", title, _short(folder["sha256"])


def _of_round(result: RoundResult) -> Iterable[tuple[Area, str, str]]:
    started = result.environment.started
    yield "hardware", "vendor", result.vendor
    yield "hardware", "chip", result.chip.title if result.chip else ABSENT
    yield "software", "framework in the key", result.key.framework
    yield "source", "version of the case", str(result.case_version)
    yield "settings", "precision", result.precision
    for name, (area, title) in _NAMES.items():
        if started.get(name) is not None:
            yield area, title, value_text(started[name])
    for library, version in sorted((started.get("library_versions") or {}).items()):
        yield "software", f"library {library}", str(version)
    for hook, where in sorted((started.get("hooks") or {}).items()):
        yield "source", f"hook {hook}", str(where)
    is_known = result.key.framework in folders("frameworks")  # its launch sets variables such as addresses
    ignored = _IGNORED | set(load_framework(result.key.framework).reserved_variables if is_known else ())
    for host, (area, names) in itertools.product(result.environment.hosts, _HOST.items()):
        yield from ((area, path, value) for name in names for path, value in _flat(name, host.get(name), ignored))
    for name, setting in result.settings.items():
        if setting.value is not None:
            yield "settings", name, value_text(setting.value) + (" (changed with --open)" if setting.forced else "")
    for finding in result.findings:
        if finding.severity != "info":
            yield "audit", finding.rule, f"{finding.severity}: {finding.actual}"


def _flat(name: str, value: Any, ignored: Collection[str]) -> Iterable[tuple[str, str]]:
    if name in ignored or value is None:
        return
    if isinstance(value, dict):
        for part, below in value.items():
            for path, text in _flat(str(part), below, ignored):
                yield f"{name} {path}".replace("_", " ") if not path.isupper() else path, text
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield from (entry for item in value for entry in _flat(name, item, ignored))
    else:
        yield name, value_text(value)


def value_text(value: Any) -> str:
    """Return a value as JSON has it, with six digits at most; null is a dash, a SHA-256 is shortened."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict | list | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return _short(str(value))


def _short(text: str) -> str:
    return f"{text[:12]}…" if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def context_lines(found: Sequence[ContextDifference]) -> list[str]:
    """Return each difference as a line for a terminal, of each side at most two values."""

    def listed(values: Sequence[str]) -> str:
        more = (f"{len(values) - 2} more",) if len(values) > 2 else ()
        return " · ".join((*values[:2], *more)) or ABSENT

    return [f"{fact.area}: {fact.name}: {listed(fact.baseline)} -> {listed(fact.other)}" for fact in found]


class LoadCurvePoint(Spec):
    """One stage of the load; null: not measured."""

    load: str
    is_open: bool
    lengths: str
    """Tokens of each prompt and answer, where stages differ in them; else empty."""
    output_token_rate: float
    ttft_p50_ms: Quantile | None
    ttft_p99_ms: Quantile | None
    token_rate_per_user: float | None
    token_rate_per_device: float | None


def load_curve(result: RoundResult | None) -> tuple[LoadCurvePoint, ...]:
    """Return the measured stages of a serving round in the order of their load; none for other tasks."""
    serving = result.serving if result is not None else None
    stages = [stage for stage in serving.stages if stage.output_token_rate is not None] if serving else []
    stages.sort(key=lambda stage: (stage.concurrency is None, stage.concurrency or stage.rate or 0.0))
    return tuple(
        LoadCurvePoint(
            load=stage.short_label,
            is_open=stage.concurrency is None,
            lengths=stage.lengths,
            output_token_rate=stage.output_token_rate or 0.0,
            ttft_p50_ms=stage.latencies["ttft"].quantiles.get("p50"),
            ttft_p99_ms=stage.latencies["ttft"].quantiles.get("p99"),
            token_rate_per_user=stage.token_rate_per_user,
            token_rate_per_device=stage.token_rate_per_device,
        )
        for stage in stages
    )


Effect = Literal["better", "worse", "different", "within noise", "equal", "unknown"]

_SEPARATING_MARKS: Final[tuple[Mark, ...]] = ("open", "synthetic", "partial", "partial_evaluation")
"""Results with and without such a mark are not comparable."""

_TIMES: Final = " × "
_WORKLOAD: Final[dict[Task, tuple[str, ...]]] = {
    "infer": ("batch_size",), "serve": ("prompts.", "slo.", "api"),
}  # fmt: skip
"""Prefixes of settings that must be equal for figures to be comparable."""

_TASKS: Final[dict[Task, str]] = {"train": "training", "infer": "inference", "serve": "serving", "automl": "search"}


class FigureDifference(Spec):
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
    """How much larger other is, as a share of the baseline; null for a figure that is a difference itself, and where a
    value is not positive."""
    relative_interval: tuple[float, float] | None
    """Its 95 % interval, from the logarithms, so that it never falls below -100 %."""
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
    units_per_epoch: float | None = None
    changed: tuple[str, ...] = ()
    """What the vendor changed of the standard case."""
    load_curve: tuple[LoadCurvePoint, ...] = ()
    """The stages of the first round of serving."""


class Pair(Spec):
    """A case of the baseline and the same case of another run."""

    baseline: Side
    other: Side
    not_comparable: tuple[str, ...]
    differences: tuple[FigureDifference, ...]
    one_sided: tuple[str, ...]
    """Figures that only one side has, with the reason why the other has none."""
    differing: tuple[ContextDifference, ...]
    is_same_run: bool = False
    """Whether both are the same run, such as its directory and its bundle."""


class RunComparison(Spec):
    """Every other run against the first."""

    schema_version: Literal[2] = 2
    baseline: str
    pairs: tuple[Pair, ...]
    unmatched: tuple[str, ...] = ()
    """Cases that only some runs have."""
    problems: tuple[str, ...] = ()


def compare(
    runs: Sequence[LoadedRun],
    *,
    across_scales: bool = False,
    force: bool = False,
    problems: Iterable[str] = (),
    options: tuple[str, str] = ("--across-scales", "--force"),
) -> RunComparison:
    """Compare each run of ``runs`` with the first; ``force`` compares also what is not comparable, and marks it.

    ``options`` are the names of ``across_scales`` and ``force`` in messages.

    Raises RequestError if there are fewer than two runs, the runs have no case in common, or cases are not comparable.
    """
    if len(runs) < 2:
        unread = "".join(f"\n{problem}" for problem in problems)
        how_many = "could be read" if unread else "given"
        raise RequestError(f"a comparison needs two or more runs, {len(runs)} {how_many}{unread}")
    first, *others = runs
    ours = first.without_trials
    pairs: list[Pair] = []
    unmatched: list[str] = []
    for other in others:
        theirs = other.without_trials
        matches = _matches(ours, theirs)
        pairs += (_pair(ours[one], theirs[two], across_scales=across_scales) for one, two in sorted(matches.items()))
        for run, cases, matched in ((first, ours, matches.keys()), (other, theirs, matches.values())):
            left = (case.result for number, case in enumerate(cases) if number not in matched)
            unmatched += (f"{one.key} {one.variant or ''}".strip() + f": only {run.summary.run} has it" for one in left)
    if not pairs:
        raise RequestError("the runs have no case in common:\n" + "\n".join(unmatched))
    refused = [f"{pair.other.run}: {pair.other.key}: {reason}" for pair in pairs for reason in pair.not_comparable]
    if refused and not force:
        hint = f"{options[1]} compares them anyway, and marks the result"
        if not across_scales and any(_TIMES in reason for reason in refused):
            hint = f"{options[0]} compares different scales; {hint}"
        raise RequestError("\n".join(["not comparable:", *refused, hint]))
    return RunComparison(
        baseline=first.summary.run, pairs=tuple(pairs), unmatched=tuple(unmatched), problems=tuple(problems)
    )


def _matches(first: Sequence[LoadedCase], other: Sequence[LoadedCase]) -> dict[int, int]:
    """Return the case number in ``other`` for each case number in ``first``, most similar pairs first.

    Cases of the same model and task are compared by framework, scale, part in a search, precision and batch size of an
    inference, variant, hardware and version of the framework, in this order.
    """

    def properties(case: LoadedCase) -> tuple[object, ...]:
        key = case.result.key
        loads = ((result.precision, result.inference.batch_size) for result in case.rounds if result.inference)
        return (
            key.framework, (key.nnodes, key.nproc), case.result.role, next(loads, None), case.result.variant,
            key.hardware, key.framework_version,
        )  # fmt: skip

    def similarity(pair: tuple[int, int]) -> list[bool]:
        return [one == two for one, two in zip(properties(first[pair[0]]), properties(other[pair[1]]), strict=True)]

    numbers = itertools.product(range(len(first)), range(len(other)))
    work = [[(case.result.key.model, case.result.task) for case in cases] for cases in (first, other)]
    possible = [(number, place) for number, place in numbers if work[0][number] == work[1][place]]
    matches: dict[int, int] = {}
    for number, place in sorted(possible, key=similarity, reverse=True):
        if number not in matches and place not in matches.values():
            matches[number] = place
    return matches


def _pair(case: LoadedCase, match: LoadedCase, *, across_scales: bool) -> Pair:
    differences: dict[FigureName, FigureDifference] = {}
    one_sided: dict[str, list[str]] = {}
    unit, metric = case.result.unit, case.first.metric_title if case.first else None
    for name in FigureName:
        before, after = _values(case, name), _values(match, name)
        if before and after:
            differences[name] = _difference(name, title_of(name, unit, metric), before, after, unit)
        elif before or after:
            without = match if before else case
            spread = without.result.figures.get(name)
            why = (spread.reason if spread else None) or "was not measured"
            one_sided.setdefault(f"{without.run.summary.run}: {why}", []).append(title_of(name, unit, metric))
    is_known = bool(case.rounds and match.rounds)
    before_context, after_context = (_context_of(side) if is_known else {} for side in (case, match))
    areas = get_args(Area)
    named = sorted(before_context.keys() | after_context.keys(), key=lambda item: (areas.index(item[0]), item[1]))
    sides = ((*item, before_context.get(item, ()), after_context.get(item, ())) for item in named)
    differing = tuple(
        ContextDifference(area=area, name=name, baseline=old, other=new) for area, name, old, new in sides if old != new
    )
    return Pair(
        baseline=_side(case),
        other=_side(match),
        differing=differing,
        is_same_run=unmarked(case.run) == unmarked(match.run),
        not_comparable=tuple(_not_comparable(case, match, across_scales=across_scales)),
        differences=tuple(differences[name] for names in in_groups(differences).values() for name in names),
        one_sided=tuple(f"{'; '.join(titles)}: {why}" for why, titles in one_sided.items()),
    )


def _side(case: LoadedCase) -> Side:
    result, summary = case.result, case.run.summary
    return Side(
        run=summary.run,
        path=str(case.run.path),
        started_at=summary.started_at,
        key=result.key,
        task=result.task,
        unit=result.unit,
        variant=result.variant,
        case_version=case.first.case_version if case.first else None,
        verdict=result.verdict,
        marks=result.marks,
        num_rounds=len(case.succeeded),
        units_per_epoch=units_per_epoch(case.first) if case.first else None,
        changed=changes_of(result.adaptation),
        load_curve=load_curve(case.first),
    )


def changes_of(cost: AdaptationCost | None) -> tuple[str, ...]:
    """Describe a vendor's changes of a case."""
    if cost is None:
        return ()
    lines = [f"{key.key}: {value_text(key.value)} instead of {value_text(key.standard)}" for key in cost.keys]
    lines += [f"hook {hook.name}" for hook in cost.hooks]
    for kind, files in (("extern", cost.extern), ("kernel", cost.kernels), ("engine", cost.engines)):
        lines += [f"{kind} {file}, {count} lines" for file, count in files.items()]
    lines += [f"requirement {name}" for name in cost.requirements]
    return (*lines, *(f"variable {name}" for name in cost.environment))


def _not_comparable(case: LoadedCase, match: LoadedCase, *, across_scales: bool) -> Iterator[str]:
    one, two = case.result, match.result
    for side in (case, match):
        if not side.succeeded:
            yield f"{side.run.summary.run} has no readable round that succeeded"
    if case.first and match.first and case.first.case_version != match.first.case_version:
        yield f"version {match.first.case_version} of the case, baseline version {case.first.case_version}"
    if one.task in ("automl", "train") and one.variant != two.variant:  # engines and servers are compared on purpose
        yield f"{_TASKS[one.task]} {two.variant}, baseline {one.variant}"
    if case.first and match.first and one.unit != two.unit:
        yield f"unit {two.unit}, baseline {one.unit}"
    for mark in _SEPARATING_MARKS:
        if (mark in one.marks) != (mark in two.marks):
            word = mark.replace("_", " ")
            yield f"{word}, baseline not" if mark in two.marks else f"not {word}, baseline is"
    if not across_scales and (one.key.nnodes, one.key.nproc) != (two.key.nnodes, two.key.nproc):
        scales = [f"{counted(key.nnodes, 'host')}{_TIMES}{counted(key.nproc, 'device')}" for key in (two.key, one.key)]
        yield ", baseline ".join(scales)
    if case.first and match.first and (workload := _WORKLOAD.get(one.task)):
        if case.first.precision != match.first.precision:
            yield f"precision {match.first.precision}, baseline {case.first.precision}"
        for name in sorted(case.first.settings.keys() & match.first.settings.keys()):
            before, after = case.first.settings[name].value, match.first.settings[name].value
            if name.startswith(workload) and before != after:
                yield f"{name} {value_text(after)}, baseline {value_text(before)}"


def _values(case: LoadedCase, name: FigureName) -> list[float]:
    return [value for result in case.succeeded if (value := result.value_of(name)) is not None]


def _difference(
    name: FigureName, title: str, before: Sequence[float], after: Sequence[float], unit: str
) -> FigureDifference:
    difference, interval = mean_difference(before, after)
    relative, relative_interval = (None, None) if name.info.is_difference else relative_difference(before, after)
    low, high = relative_interval or interval or (math.nan, math.nan)
    effect: Effect = "different"
    if interval is None:
        effect = "unknown"
    elif low <= 0 <= high:
        effect = "equal" if low == high else "within noise"
    elif name.info.better != "neither":
        effect = "better" if (difference > 0) == (name.info.better == "higher") else "worse"
    return FigureDifference(
        figure=name,
        title=title,
        unit=unit_of(name, unit),
        baseline=sum(before) / len(before),
        other=sum(after) / len(after),
        num_rounds=(len(before), len(after)),
        difference=difference,
        interval=interval,
        relative=relative,
        relative_interval=relative_interval,
        effect=effect,
    )
