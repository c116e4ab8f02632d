"""Aggregate figures over rounds: mean, standard deviation, 95 % interval, and rounds needed for a narrow interval."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import ValidationError

import accelmark
from accelmark.results import schema
from accelmark.results.figures import WARNED_FIGURES, FigureName, figures_of
from accelmark.results.read.round_dir import LedgerState, ledger_states, node_dirs, planned_jobs, read_job, read_json
from accelmark.results.schema import Figure, Finding, JobState, RoundResult, Spread, Summary
from accelmark.results.store.bundle import write_manifest
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import RESULT_FILE, SUMMARY_FILE, load_round
from accelmark.spec.errors import RunError
from accelmark.spec.job import InferJob, ServeJob, TrainingWork
from accelmark.spec.key import CaseKey
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.tuning import OPTIONS, TUNING_LAYER, TrialRole, TuningSpec

_MANY_ROUNDS: Final = 100
"""Rounds from which repeating is no remedy for a wide interval."""
NARROW: Final = 0.01
"""Half-width of a narrow interval, relative to the mean."""


def spread(figures: Sequence[Figure]) -> Spread:
    """Aggregate a figure over the rounds that have a value; null with a reason where none has."""
    values = [figure.value for figure in figures if figure.value is not None]
    reason = next((figure.reason for figure in figures if figure.reason), None)
    if not values:
        return Spread(mean=None, stdev=None, ci95=None, num_rounds=0, reason=reason or "no round succeeded")
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return Spread(mean=mean, stdev=None, ci95=None, num_rounds=count, reason=reason)
    stdev = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_t(count - 1) * stdev / math.sqrt(count)
    return Spread(
        mean=mean, stdev=stdev, ci95=(mean - half, mean + half), num_rounds=count,
        rounds_needed=rounds_needed(mean, stdev), reason=reason,
    )  # fmt: skip


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def rounds_needed(mean: float, stdev: float) -> int | None:
    """Return the number of rounds for an interval within :data:`NARROW` of the mean; None for a mean of 0.

    The smallest n with t(n - 1) x stdev / sqrt(n) <= NARROW x |mean|, for the standard deviation so far.
    """
    if mean == 0:
        return None
    relative = stdev / (NARROW * abs(mean))
    count = max(2, math.floor((1.9599 * relative) ** 2))
    while student_t(count - 1) * relative > math.sqrt(count):
        count += 1
    return count


def aggregate(rounds: Sequence[RoundResult]) -> dict[FigureName, Spread]:
    """Aggregate every figure over the rounds that succeeded."""
    good = [result for result in rounds if result.state == "succeeded"]
    names = tuple(name for name in FigureName if any(name in result.figures for result in rounds))
    names = names if rounds else figures_of("train")
    return {name: spread([result.figures[name] for result in good if name in result.figures]) for name in names}


def finding_texts(findings: Iterable[Finding], *severities: schema.Severity) -> list[str]:
    """Return each distinct finding of these severities once, with its rounds."""
    by_text: dict[Finding, set[int | None]] = {}
    for finding in findings:
        if finding.severity in severities:
            by_text.setdefault(finding.model_copy(update={"round": None}), set()).add(finding.round)
    return [finding.about(sorted(filter(None, rounds))) for finding, rounds in by_text.items()]


def spread_warnings(figures: dict[FigureName, Spread], key: CaseKey) -> list[str]:
    """Return warnings about wide intervals, and about a single round, which has no interval."""
    warnings: list[str] = []
    num_rounds = max((spread.num_rounds for spread in figures.values()), default=0)
    if num_rounds == 1:
        three = key.model_copy(update={"repeat": 3})
        warnings.append(f"no confidence interval: only one round. For three rounds, use {three}")
    wide: list[str] = []
    needed = 0
    for name in WARNED_FIGURES:
        spread = figures.get(name)
        half = spread.relative_half95 if spread is not None else None
        if spread is not None and spread.rounds_needed is not None and half is not None and half > NARROW:
            digits = f"{100 * half:.0f}" if half >= 0.1 else f"{100 * half:.2g}"
            of = "" if spread.num_rounds == num_rounds else f" ({spread.num_rounds} rounds)"
            wide.append(f"{name.info.title.lower()} ±{digits} %{of}")
            needed = max(needed, spread.rounds_needed)
    if wide:
        intervals = f"wide 95 % intervals after {num_rounds} rounds: {'; '.join(wide)}"
        advice = ": reduce the noise first, by an idle host or longer rounds" if needed > _MANY_ROUNDS else ""
        warnings.append(f"{intervals}. About {needed:,} rounds are needed for 1 %{advice}")
    return warnings


_IN_VARIANT: Final = ("compiler", "precision", "batch_size")
_WORST_FIRST: Final[tuple[JobState, ...]] = (
    "failed", "timed_out", "lost", "cancelled", "running", "preparing", "queued",
)  # fmt: skip

Audit = Callable[[Path, Mapping[str, RoundResult], int], schema.CaseVerdict]
"""Returns the verdict on the rounds of one key.

Arguments: the run's directory, the rounds (directory relative to the run -> result), and the number of rounds planned.
"""


def round_result(round_dir: Path) -> RoundResult:
    """Compute the result of one round, whether it succeeded, failed, was lost or is incomplete.

    Raises RunError if ``job.json`` or a rank's log cannot be read, or the kind of work has no figures.
    """
    job, nodes = read_job(round_dir), node_dirs(round_dir)
    if isinstance(job.work, InferJob):
        from accelmark.results.rounds.inference import infer_round

        return infer_round(round_dir, job, job.work, nodes)
    if isinstance(job.work, ServeJob):
        from accelmark.results.rounds.serving import serve_round

        return serve_round(round_dir, job, job.work, nodes)
    if isinstance(job.work, TrainingWork):
        from accelmark.results.rounds.training import train_round

        return train_round(round_dir, job, job.work, nodes)
    raise RunError(f"{round_dir}: no figures are defined for work of kind {job.work.kind!r}")


def write_round(round_dir: Path) -> RoundResult:
    """Compute the result of one round as :func:`round_result`, and write its ``result.json``."""
    result = round_result(round_dir)
    write_atomic(round_dir / RESULT_FILE, result.model_dump_json() + "\n")
    return result


def summarise(run_dir: Path, audit: Audit, *, recompute: bool = False) -> Summary:
    """Write ``summary.json``, ``MANIFEST.sha256`` and missing ``result.json`` files; ``recompute``: all of them."""

    def result_of(round_dir: Path) -> RoundResult:
        if recompute or not (round_dir / RESULT_FILE).is_file():
            return write_round(round_dir)
        return load_round(round_dir / RESULT_FILE)

    summary, _ = gather(run_dir, audit, result_of)
    write_atomic(run_dir / SUMMARY_FILE, summary.model_dump_json(indent=1) + "\n")
    write_manifest(run_dir)
    return summary


def gather(
    run_dir: Path, audit: Audit, result_of: Callable[[Path], RoundResult]
) -> tuple[Summary, dict[str, RoundResult]]:
    """Return the summary of a run, and its rounds by directory. Raises RunError if ``run_dir`` has no rounds."""
    plan = read_json(run_dir / "plan.json")
    planned = planned_jobs(plan)
    places = (path.parent.relative_to(run_dir).as_posix() for path in run_dir.glob("*/round*/job.json"))
    on_disk = sorted(places, key=lambda name: (name.partition("/")[0], len(name), name))
    names = list(dict.fromkeys([*planned, *on_disk]))
    if not names:
        raise RunError(f"{run_dir}: is not a run: it has no rounds and no plan.json with jobs")
    rounds: dict[str, RoundResult] = {}
    problems: list[str] = []
    for name in names:
        if not (run_dir / name / "job.json").is_file() and name in planned:
            continue
        try:
            rounds[name] = result_of(run_dir / name)
        except RunError as error:
            problems.append(str(error))
    by_slug: dict[str, list[str]] = {}
    for name in names:
        by_slug.setdefault(name.split("/")[0], []).append(name)
    cases: list[schema.CaseResult] = []
    for slug, listed in by_slug.items():
        bad = [problem for problem in problems if f"/{slug}/" in problem]
        present = {name: rounds[name] for name in listed if name in rounds}
        case = _case(run_dir, audit, present, listed, bad, [planned[name] for name in listed if name in planned])
        cases += [case] if case is not None else []
    vendors = [result.vendor for result in rounds.values()]
    tuning = None
    with contextlib.suppress(KeyError, ValidationError):
        tuning = TuningSpec.model_validate(plan["tuning"])
    summary = Summary(
        accelmark_version=str(plan.get("accelmark_version") or accelmark.__version__),
        run=run_dir.resolve().name,
        started_at=min((result.started_at for result in rounds.values() if result.started_at), default=""),
        finished_at=max((_finished_at(result) for result in rounds.values()), default=""),
        state=worst([case.state for case in cases if case.role != "trial"]),
        vendor=vendors[0] if vendors else str(plan.get("vendor") or "unknown"),
        cases=tuple(cases),
        tuning=tuning,
        problems=tuple(problems),
    )
    return summary, rounds


def _case(
    run_dir: Path,
    audit: Audit,
    rounds: Mapping[str, RoundResult],
    directories: Sequence[str],
    problems: Sequence[str],
    planned: Sequence[Mapping[str, Any]],
) -> schema.CaseResult | None:
    """Summarise the rounds of one key; None where neither a round nor the plan states the key."""
    results = list(rounds.values())
    first = results[0] if results else None
    key, variant = first.key if first else None, _variant(first) if first else None
    task: schema.Task = "train"
    for job in reversed(planned) if first is None else ():
        with contextlib.suppress(KeyError, TypeError, ValidationError):
            key = CaseKey.model_validate(job["key"])
            kind = job["work"]["kind"]
            task = kind if kind in ("infer", "serve") else "train"
            variant = InferSettings.model_validate(job["work"]["settings"]).title if kind == "infer" else None
    if key is None:
        return None
    figures = aggregate(results)
    verdict = audit(run_dir, rounds, max(len(directories), 1))
    ended = ledger_states(run_dir)
    missing = [name for name in directories if not (run_dir / name / "job.json").is_file()]
    lost: LedgerState = ("lost", "the files of the round are missing")
    told = [ended.get(name, ("queued", None)) for name in missing]
    not_started = [last if last[0] in ("queued", "cancelled") else lost for last in told]
    states: list[JobState] = [result.state for result in results]
    states.extend("lost" for _ in problems)
    states.extend(state for state, _ in not_started)
    warnings = [*spread_warnings(figures, key), *finding_texts(verdict.findings, "warning")]
    warnings += dict.fromkeys(f"{node.host}: {what}" for one in results for node in one.nodes for what in node.warnings)
    answers = {result.converged for result in results}
    roles = {job.get("role") for job in planned}
    return schema.CaseResult(
        key=key,
        task=first.task if first else task,
        unit=first.unit if first else "sample",
        variant=variant,
        role=first.role if first else next((role for role in get_args(TrialRole) if role in roles), None),
        state=worst(states),
        converged=False if False in answers else True if answers == {True} else None,
        verdict="INVALID" if problems else verdict.verdict,
        reasons=(*verdict.reasons, *problems, *dict.fromkeys(reason for _, reason in not_started if reason)),
        marks=tuple(dict.fromkeys(mark for result in results for mark in result.marks)),
        figures=figures,
        rounds=tuple(rounds),
        warnings=tuple(warnings),
        findings=verdict.findings,
        adaptation=verdict.adaptation,
    )


def _variant(result: RoundResult) -> str | None:
    inference, serving = result.inference, result.serving
    if serving is not None and serving.engine is None:
        return f"{serving.source} {result.precision}"
    if inference is None:
        return None if result.rules is None else f"rules {result.rules}"
    words = [f"{inference.compiler or 'no engine'} {result.precision} batch {inference.batch_size}"]
    for name, setting in sorted(result.settings.items()):
        if name.startswith(OPTIONS):
            value = ",".join(map(str, setting.value)) if isinstance(setting.value, list | tuple) else setting.value
            words.append(f"{name.removeprefix(OPTIONS)}={value}")
        elif setting.layer == TUNING_LAYER and name not in _IN_VARIANT:
            words.append(f"{name}={setting.value}")
    return " ".join(words)


def worst(states: Sequence[JobState]) -> JobState:
    """Return the worst state, ``succeeded`` only if all did, ``queued`` for none."""
    return next((state for state in _WORST_FIRST if state in states), "succeeded" if states else "queued")


def _finished_at(result: RoundResult) -> str:
    ends = [""]
    for node in result.nodes:
        with contextlib.suppress(ValueError):
            ended = datetime.fromisoformat(node.started_at) + timedelta(seconds=node.duration_s)
            ends.append(ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"))
    return max(ends)
