"""Acceptance of a vendor's case after FlagPerf's rules, judged from the results of ordinary runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Final, Literal, NamedTuple

from accelmark.results.figures import FigureName
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.spec.errors import RequestError
from accelmark.spec.number_format import counted, duration, percent
from accelmark.spec.plugins.catalog import folders, framework_device, frameworks_of, load_case, load_vendor

MIN_REPEATS_S: Final = 600.0
"""Training time of all rounds of a scale."""
Scale = tuple[int, int]
"""Hosts, and devices on each."""


class Criterion(NamedTuple):
    """One rule of acceptance at one scale."""

    scale: str
    rule: str
    expected: str
    actual: str
    passed: bool | None
    """None: it does not apply, or nothing is expected."""
    run: str | None


def newest_cases(runs: Iterable[LoadedRun], vendor: str, model: str, framework: str) -> dict[Scale, LoadedCase]:
    """Return the case of the newest run of each scale, smallest first."""
    newest = {
        (case.result.key.nnodes, case.result.key.nproc): case
        for run in sorted(runs, key=lambda run: run.summary.started_at)
        for case in run.cases
        if run.summary.vendor == vendor and case.result.task == "train"
        if (case.result.key.model, case.result.key.framework) == (model, framework)
    }
    return dict(sorted(newest.items(), key=lambda entry: (math.prod(entry[0]), entry[0])))


def judge(cases: dict[Scale, LoadedCase], scales: Sequence[Scale], efficiency: float | None) -> list[Criterion]:
    """Judge each scale; ``efficiency`` is the vendor's expectation of the speed-up as a share of the ideal one."""
    base = cases.get(min(scales, key=math.prod))
    return [criterion for scale in scales for criterion in _criteria(scale, cases.get(scale), base, efficiency)]


def _criteria(
    scale: Scale, case: LoadedCase | None, base: LoadedCase | None, efficiency: float | None
) -> Iterator[Criterion]:
    name = f"{scale[0]}x{scale[1]}"
    if case is None:
        yield Criterion(name, "run", "a run at this scale", "none", False, None)
        return
    result, run = case.result, case.run.summary.run
    target = case.first.target if case.first is not None else None
    metric = result.mean_of(FigureName.FINAL_METRIC)
    reached = "not measured" if metric is None else f"{metric:.4g}"
    yield Criterion(name, "target", target.text if target else "none: speed only", reached, result.converged, run)
    rules = sorted({each.rule for each in result.findings if each.severity in ("error", "open")})
    actual = f"{result.verdict}{': ' if rules else ''}{', '.join(rules)}"
    # A chip that AccelMark does not ship is OPEN until its peaks are reviewed, which follows acceptance.
    is_new_chip = result.verdict == "OPEN" and rules == ["chip-mismatch"]
    expected = "VALID, but for unreviewed peaks" if is_new_chip else "VALID"
    yield Criterion(name, "adaptation", expected, actual, is_new_chip or result.verdict == "VALID", run)
    lacks = "telemetry-missing" in rules
    yield Criterion(name, "telemetry", "of every device", "missing" if lacks else "present", not lacks, run)
    total_s = sum(each.value_of(FigureName.RAW_TRAIN_TIME) or 0.0 for each in case.succeeded)
    rounds = f"{duration(total_s)}, {counted(len(case.succeeded), 'round')}"
    yield Criterion(name, "repeats", f"at least {duration(MIN_REPEATS_S)}", rounds, total_s >= MIN_REPEATS_S, run)
    if base is not None and case is not base:
        rates = [each.result.mean_of(FigureName.THROUGHPUT_STEADY) or math.nan for each in (case, base)]
        share = rates[0] / rates[1] * base.result.key.world_size / result.key.world_size
        expected = "none stated" if efficiency is None else f"at least {percent(efficiency)} of ideal"
        passed = None if efficiency is None else share >= efficiency
        yield Criterion(name, "speed-up", expected, f"{percent(share)} of ideal", passed, run)


def rounds_lacking(case: LoadedCase | None) -> int:
    """Return how many rounds more last :data:`MIN_REPEATS_S`; 1 without a round that shows how long one takes."""
    times_s = [each.value_of(FigureName.RAW_TRAIN_TIME) or 0.0 for each in case.succeeded] if case is not None else []
    if not sum(times_s):
        return 1
    return 0 if sum(times_s) >= MIN_REPEATS_S else math.ceil(1.1 * MIN_REPEATS_S / fmean(times_s))


class Support(NamedTuple):
    """What is known of a case in a framework on a vendor's devices."""

    case: str
    framework: str
    vendor: str
    state: Literal["accepted", "ran", "described", "not possible"]
    """``described``: the vendor's device is declared for the framework, and the case has code for it."""
    evidence: str
    """Names of runs, or why it is not possible."""


def support(runs: Sequence[LoadedRun]) -> list[Support]:
    """Return the state of each training case in each of its frameworks on each vendor."""
    vendors = {name: load_vendor(name) for name in folders("vendors")}
    states: list[Support] = []
    for case in folders("cases"):
        for framework in frameworks_of(load_case(case)):
            for vendor, spec in vendors.items():
                cases = newest_cases(runs, vendor, case, framework)
                names = ", ".join(dict.fromkeys(each.run.summary.run for each in cases.values()))
                if cases:
                    is_rejected = any(each.passed is False for each in judge(cases, list(cases), None))
                    states.append(Support(case, framework, vendor, "ran" if is_rejected else "accepted", names))
                    continue
                try:
                    framework_device(spec, framework)
                    states.append(Support(case, framework, vendor, "described", str(folders("vendors")[vendor].path)))
                except RequestError as error:
                    states.append(Support(case, framework, vendor, "not possible", str(error)))
    return states
