"""Compute the result of a training round."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from accelmark.results.equivalence import equivalence_finding
from accelmark.results.figure_names import TRAIN_FIGURES, FigureName
from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.curves import curves_of, histogram, telemetry_series
from accelmark.results.figures.timeline import Timeline, read_timeline
from accelmark.results.figures.training import (
    Figures,
    compute_figures,
    converged,
    limited_to_log,
    memory_figure,
    outcome_figures,
    reference_error,
    time_figures,
    value,
)
from accelmark.results.read.reevaluation import Reevaluation, saved_checkpoints
from accelmark.results.read.round_dir import LedgerState, NodeDir, earlier_attempts, node_dirs
from accelmark.results.rounds.clocks import step_clock_findings
from accelmark.results.rounds.consistency import agreement_findings, log_findings
from accelmark.results.rounds.hosts import contention_findings, host_infos, job_state, read_telemetry, round_marks
from accelmark.results.rounds.pace import pace_findings
from accelmark.results.rounds.stragglers import straggler_findings, times_of_ranks, why_unknown
from accelmark.results.schema import Environment, Finding, RoundResult, finding
from accelmark.spec.job import ExternalJob, JobSpec, TrainingWork, TrainJob
from accelmark.spec.number_format import limit_percent, percent

REFERENCE_RULE: Final = "reference-loss"
FLOPS_TOLERANCE: Final = 0.05
"""Relative difference of the counted FLOPs from the case's formula that causes a warning."""


def train_round(
    round_dir: Path,
    job: JobSpec,
    work: TrainingWork,
    nodes: list[NodeDir],
    ledger: LedgerState | None,
    checked: Reevaluation | None,
) -> RoundResult:
    """Compute the result of a training round, also of one that failed, was lost or is incomplete.

    ``ledger`` is the last state that the coordinator recorded, ``checked`` the result of the evaluation job. Raises
    RunError if a rank's log cannot be read.
    """
    timeline = read_timeline([log for node in nodes for log in node.rank_logs()])
    earlier = earlier_attempts(round_dir)
    num_continued = timeline.num_attempts - 1 if timeline is not None else 0
    before = [node for attempt in earlier[len(earlier) - num_continued :] for node in node_dirs(attempt)]
    state, reason = job_state(job, nodes, _rank_error(timeline), timeline is not None, ledger)
    findings: list[Finding] = []
    hosts, no_telemetry = read_telemetry(nodes, timeline.train_spans if timeline else {}, findings, before)
    figures = _figures(job, work, timeline, checked, hosts, no_telemetry, findings)
    per_step = samples_per_step(job, work)
    if timeline is not None:
        findings += _log_findings(job, work, timeline)
        if timeline.num_attempts == 1 and earlier:
            actual = "the round was started again at step 1: figures are of its last attempt only"
            findings.append(finding("info", "resumed", "", actual))
        findings += contention_findings(nodes, {end.rank: end.finished for end in timeline.ranks})
        findings += log_findings(timeline, job, per_step) if isinstance(work, TrainJob) else ()
        findings += step_clock_findings(timeline, job.device_type)
        if job.extern is not None and state == "succeeded":
            findings += pace_findings(timeline, saved_checkpoints(round_dir))
    rank_times = times_of_ranks(timeline, nodes) if timeline is not None else None
    findings += straggler_findings(rank_times)
    findings += agreement_findings(round_dir, job, nodes, timeline.times if timeline else {}, hosts)
    settings = work.settings
    return RoundResult(
        key=job.key,
        task="train",
        round=job.round,
        case_version=job.case_version,
        unit=work.unit,
        state=state,
        reason=reason,
        converged=converged(timeline, work, per_step, checked),
        target=work.target,
        marks=round_marks(
            job,
            state,
            findings,
            synthetic=settings.loader.synthetic,
            partial_evaluation=settings.evaluate.max_batches is not None,
            resumed=timeline is not None and timeline.num_attempts > 1,
        ),
        vendor=job.vendor,
        chip=job.chip,
        precision=_precision(job, timeline),
        started_at=min((node.exit.started_at for node in (*before, *nodes) if node.exit), default=""),
        figures=figures,
        curves=curves_of(timeline, work.units_per_sample, per_step) if timeline else {},
        step_ms_histogram=histogram(timeline.step_ms) if timeline else (),
        telemetry=telemetry_series(hosts),
        num_steps=timeline.num_steps if timeline else 0,
        num_samples=timeline.num_samples if timeline else 0,
        num_devices=job.key.world_size,
        min_rounds=work.min_repeats,
        rank_times=rank_times,
        rank_times_unknown=why_unknown(timeline) if timeline is not None else None,
        nodes=tuple(node.exit for node in nodes if node.exit),
        environment=_environment(nodes, timeline),
        settings=job.provenance,
        findings=tuple(findings),
    )


def samples_per_step(job: JobSpec, work: TrainingWork) -> int:
    """Return the samples of an optimizer step over all devices."""
    return work.settings.samples_per_step(job.key.world_size)


def _rank_error(timeline: Timeline | None) -> str | None:
    """Return the message of the first rank that did not complete."""
    for end in timeline.ranks if timeline else ():
        if end.finished is not None and end.finished.state != "completed":
            return f"rank {end.rank}: {end.finished.message or end.finished.end_reason}"
    return None


def _precision(job: JobSpec, timeline: Timeline | None) -> str:
    """Return the precision that the lead rank reports, else the requested one."""
    started = timeline.lead_end.started if timeline else None
    return started.precision if started else job.work.precision


def _figures(
    job: JobSpec,
    train: TrainingWork,
    timeline: Timeline | None,
    checked: Reevaluation | None,
    hosts: HostSamples,
    no_telemetry: str,
    findings: list[Finding],
) -> Figures:
    if timeline is None:
        return {name: value(None, "no rank wrote an event") for name in TRAIN_FIGURES}
    units = timeline.num_samples * train.units_per_sample
    figures = time_figures(timeline, units, job.key.world_size) | outcome_figures(timeline, train, checked)
    figures |= compute_figures(job, timeline, figures[FigureName.THROUGHPUT_PER_DEVICE], _precision(job, timeline))
    took_s = checked.duration_s if checked is not None else None
    figures[FigureName.REEVALUATION_TIME] = value(took_s, "its weights were not evaluated after the round")
    figures[FigureName.PEAK_DEVICE_MEMORY] = memory_figure(timeline, job.device_type)
    consumed, warnings = consumption_figures(hosts, units, job.device_type, no_telemetry)
    findings += [finding("warning", "energy-cross-check", "", what) for what in warnings]
    figures |= consumed
    if isinstance(train, ExternalJob):
        figures = limited_to_log(figures, train.trainer)
    return {name: figures[name] for name in TRAIN_FIGURES}


def _environment(nodes: list[NodeDir], timeline: Timeline | None) -> Environment:
    lead = timeline.lead_end if timeline else None
    parts = {
        "started": lead.started if lead else None,
        "compiled": lead.compiled if lead else None,
    }
    return Environment(
        hosts=host_infos(nodes), **{name: part.model_dump() for name, part in parts.items() if part is not None}
    )


def _log_findings(job: JobSpec, work: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    world = job.num_ranks
    if len(timeline.ranks) != world:
        yield finding("error", "ranks-present", f"events of {world} ranks", f"events of {len(timeline.ranks)} ranks")
    for end in timeline.ranks:
        if end.malformed:
            lines = f" (lines {', '.join(map(str, end.malformed_lines))})" if end.malformed_lines else ""
            actual = f"rank {end.rank}: {end.malformed} malformed PerfLog lines{lines}"
            yield finding("warning", "log-readable", "", actual)
        if end.truncated:
            yield finding("warning", "log-complete", "", f"rank {end.rank}: the last line of its log is incomplete")
    for warning in dict.fromkeys(warning for end in timeline.ranks for warning in end.warnings):
        yield finding("warning", "rank-warning", "", warning)
    if bad := list(dict.fromkeys(error for end in timeline.ranks for error in end.bad_samples)):
        actual = f"{len(bad)} training samples cannot be read and were replaced by others: {'; '.join(bad)}"
        yield finding("open", "samples-readable", "all training samples", actual)
    if timeline.nonfinite_step is not None:
        yield finding("error", "loss-finite", "", f"the loss of step {timeline.nonfinite_step} is NaN or infinite")
    yield from _flops_finding(timeline)
    equivalence = equivalence_finding(job, timeline.lead_end.started)
    if equivalence is not None:
        yield equivalence
    yield from _reference_finding(job, work, timeline)


def _reference_finding(job: JobSpec, train: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    """Yield how the losses compare with the reference curve, or why they are not compared."""
    reference = train.reference_loss
    if train.settings.loader.synthetic:
        return
    if reference is None:
        if train.target is None:
            do = "'accelmark train CASE --write-reference' measures a reference loss curve"
            yield finding("info", REFERENCE_RULE, "", f"no reference yet: convergence was not judged; {do}")
        return
    per_step = samples_per_step(job, train)
    if not reference.applies(per_step):
        expected, actual = f"{reference.samples_per_step} samples a step", f"{per_step}: losses were not compared"
        yield finding("warning", REFERENCE_RULE, expected, actual)
        return
    limit = reference.max_mean_relative_error
    error = reference_error(timeline, train)
    if error is None:
        actual = f"no finite loss at step {max(reference.steps)}, the last step of the reference curve"
    else:
        actual = f"mean relative error {percent(error)} against the reference loss ({reference.source})"
    followed = error is not None and error <= limit
    yield finding("info" if followed else "error", REFERENCE_RULE, f"at most {limit_percent(limit)}", actual)


def _flops_finding(timeline: Timeline) -> Iterable[Finding]:
    finished = timeline.lead_end.finished
    counted, formula = (finished.flops_per_sample, finished.flops_per_sample_formula) if finished else (None, None)
    if counted and formula and abs(counted - formula) > FLOPS_TOLERANCE * formula:
        actual = f"{counted:.4g} FLOPs per sample were counted"
        yield finding("warning", "flops-by-formula", f"about {formula:.4g} by the case's formula", actual)
