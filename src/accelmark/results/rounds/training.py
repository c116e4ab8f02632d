"""One round of one case: from the files its processes left to a :class:`RoundResult`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.curves import curves_of, histogram
from accelmark.results.figures.definitions import TRAIN_FIGURES, FigureName
from accelmark.results.figures.disturbance import FOREIGN_PROCESS, disturbances, is_disturbed
from accelmark.results.figures.telemetry_curves import telemetry_series
from accelmark.results.figures.timeline import Timeline, read_timeline
from accelmark.results.figures.training import (
    FLOPS_TOLERANCE,
    Figures,
    compute_figures,
    converged,
    memory_figure,
    outcome_figures,
    reference_error,
    time_figures,
    with_ceiling,
    work_of,
)
from accelmark.results.read.samples import Samples, read_samples
from accelmark.results.rounds.inspected import inspected_by_all
from accelmark.results.rounds.state import NodeDir, ledger_states, node_dirs, read_json, state_of
from accelmark.results.schema import Environment, Figure, Finding, JobState, Mark, RoundResult
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec
from accelmark.spec.settings import TrainSettings
from accelmark.spec.work import InferJob, TrainingWork


def round_result(round_dir: Path, *, state: JobState | None = None, reason: str | None = None) -> RoundResult:
    """Compute everything there is to know of one round; works on a partial, failed or lost one too.

    Args:
        round_dir: ``<run>/<key slug>/round<N>``.
        state: how the coordinator saw it end; null reads the run's ``events.jsonl``.
        reason: with ``state``.

    Raises:
        RunError: ``job.json`` or a rank's log cannot be read.
    """
    job = read_job(round_dir)
    nodes = node_dirs(round_dir)
    ledger = (state, reason) if state else ledger_states(round_dir.parents[1]).get(_job_name(round_dir))
    match job.work:
        case InferJob():
            from accelmark.results.rounds.inference import infer_round  # it builds on this module

            return infer_round(job, job.work, nodes, ledger)
        case TrainingWork():
            return _training_round(job, job.work, nodes, ledger)
    raise RunError(f"{round_dir}: no figures are defined for work of kind {job.work.kind!r}")


def _training_round(
    job: JobSpec, work: TrainingWork, nodes: list[NodeDir], ledger: tuple[JobState, str | None] | None
) -> RoundResult:
    timeline = read_timeline([log for node in nodes for log in node.rank_logs()])
    ended, why = state_of(job, nodes, timeline, ledger)
    findings: list[Finding] = []
    hosts, no_telemetry = read_telemetry(nodes, timeline.train_spans if timeline else {}, findings)
    figures = _figures(job, work, timeline, hosts, no_telemetry or "telemetry left no samples", findings)
    if timeline is not None:
        findings += _log_findings(job, work, timeline)
        findings += disturbances(nodes, {end.rank: end.finished for end in timeline.ranks})
    settings = work.settings
    per_step = settings.batch_size * settings.gradient_accumulation_steps * job.key.world_size
    return RoundResult(
        key=job.key,
        task="train",
        round=job.round,
        case_version=job.case_version,
        unit=work.unit,
        state=ended,
        reason=why,
        converged=converged(timeline, work),
        target=work.target.model_dump() if work.target else None,
        marks=_marks(job, settings, timeline, ended, findings),
        vendor=job.vendor,
        chip=job.chip,
        precision=_precision(job, timeline),
        started_at=min((node.exit.started_at for node in nodes if node.exit), default=""),
        figures=figures,
        curves=curves_of(timeline, work.units_per_sample, per_step) if timeline else {},
        step_ms_histogram=histogram(timeline.step_ms) if timeline else (),
        telemetry=telemetry_series(hosts),
        num_steps=timeline.num_steps if timeline else 0,
        num_samples=timeline.num_samples if timeline else 0,
        num_devices=job.key.world_size,
        min_rounds=work.min_repeats,
        nodes=tuple(node.exit for node in nodes if node.exit),
        environment=_environment(nodes, timeline),
        settings=job.provenance,
        findings=tuple(findings),
    )


def read_job(round_dir: Path) -> JobSpec:
    """Read ``job.json``. Raises RunError naming the file when it is missing or not a job."""
    path = round_dir / "job.json"
    try:
        return JobSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path}: is not a job: {where or 'the file'}: {first['msg']}") from error


def _job_name(round_dir: Path) -> str:
    return f"{round_dir.parent.name}/{round_dir.name}"


def _precision(job: JobSpec, timeline: Timeline | None) -> str:
    """Return the precision that ran, as the lead rank reports it, else the one asked for."""
    started = timeline.lead_end.started if timeline else None
    if started is not None:
        return started.precision
    return job.work.precision


def read_telemetry(
    nodes: list[NodeDir], all_spans: Mapping[str, tuple[tuple[float, float], ...]], findings: list[Finding]
) -> tuple[HostSamples, str | None]:
    """Read the samples of every host that worked; the reason why there are none, else None.

    ``all_spans``: node directory -> when the measured work went on, on that host's monotonic clock.
    """
    hosts: dict[str, tuple[Samples, tuple[tuple[float, float], ...]]] = {}
    missing: list[str] = []
    for node in nodes:
        spans = all_spans.get(str(node.path), ())
        path = node.path / "telemetry.jsonl"
        if not path.is_file():
            missing.append(f"{node.host}: there is no telemetry.jsonl")
            continue
        samples = read_samples(path)
        if not len(samples.t):
            missing.append(f"{node.host}: telemetry.jsonl holds no sample")
        if not len(samples.t) or not spans:
            continue
        samples.only(*_devices_of(node))
        if not samples.devices:
            actual = f"{node.host}: no device of the ranks was read: {samples.reason('devices')}"
            findings.append(_finding("open", "telemetry-present", "samples of the devices that ranks ran on", actual))
        hosts[node.host] = (samples, spans)
        findings += _telemetry_findings(node.host, samples)
    findings += [_finding("error", "telemetry-present", "samples from every host", what) for what in missing]
    if missing:
        return {}, missing[0]
    return hosts, None if hosts else "training did not begin"


def _devices_of(node: NodeDir) -> tuple[list[int] | None, int]:
    """Return the indices of the devices that the ranks of a host were given (None: not told) and their number."""
    task = read_json(node.path / "agent.json")
    num_ranks = int(task.get("nproc") or len(node.rank_logs()))
    visible = task.get("visible_devices") or {}
    told = (read_json(node.path / "sys_info.json").get("environment") or {}).get(visible.get("variable"))
    if isinstance(told, str) and all(part.strip().isdigit() for part in told.split(",")):
        return [int(part) for part in told.split(",")][:num_ranks], num_ranks
    return None, num_ranks


def _figures(
    job: JobSpec,
    train: TrainingWork,
    timeline: Timeline | None,
    hosts: HostSamples,
    no_telemetry: str,
    findings: list[Finding],
) -> Figures:
    if timeline is None:
        return {name: Figure(value=None, reason="no rank wrote an event") for name in TRAIN_FIGURES}
    work = work_of(job, timeline)
    figures = time_figures(timeline, work) | outcome_figures(timeline, work, train)
    per_device = figures[FigureName.THROUGHPUT_PER_DEVICE]
    precision = _precision(job, timeline)
    figures |= compute_figures(job, timeline, work, per_device, precision)
    figures = with_ceiling(figures, *_ceiling(job, precision))
    figures[FigureName.PEAK_DEVICE_MEMORY] = memory_figure(timeline, job.device_type)
    consumed, warnings = consumption_figures(hosts, work.units, job.device_type, no_telemetry)
    findings += [_finding("warning", "energy-cross-check", "power and counter agree", what) for what in warnings]
    ordered = figures | consumed
    return {name: ordered[name] for name in TRAIN_FIGURES}


def _ceiling(job: JobSpec, precision: str) -> tuple[float | None, str]:
    """Return the measured rate of a device for the precision that ran, or the reason why there is none."""
    if job.ceilings is None:
        return None, "this device was not probed: 'accelmark probe' measures its ceilings"
    if job.ceilings.disturbed:
        busy = "; ".join(job.ceilings.disturbed)
        return None, f"the host was busy when it was probed ({busy}): 'accelmark probe' again while it is quiet"
    rate = job.ceilings.matmul.get(precision)
    if rate is None or rate.value is None:
        return None, (rate.reason if rate is not None else None) or f"the probe measured no {precision}"
    return rate.value, ""


def _marks(
    job: JobSpec, settings: TrainSettings, timeline: Timeline | None, state: JobState, findings: Iterable[Finding]
) -> tuple[Mark, ...]:
    forced = any(setting.forced for setting in job.provenance.values())
    held: dict[Mark, bool] = {
        "open": job.open or forced,
        "synthetic": settings.loader.synthetic,
        "partial": state != "succeeded",
        "partial_evaluation": settings.evaluate.max_batches is not None,
        "busy_machine": is_disturbed(findings),
        "resumed": job.resume or bool(timeline and timeline.num_attempts > 1),
    }
    return tuple(mark for mark, is_held in held.items() if is_held)


def _environment(nodes: list[NodeDir], timeline: Timeline | None) -> Environment:
    started = timeline.lead_end.started if timeline else None
    hosts = [{"host": node.host} | read_json(node.path / "sys_info.json") for node in nodes]
    seen = inspected_by_all(timeline.ranks) if timeline else None
    return Environment(
        hosts=tuple(hosts),
        started=started.model_dump() if started else {},
        inspected=seen.model_dump() if seen else {},
    )


def _finding(severity: Any, rule: str, expected: str, actual: str) -> Finding:
    return Finding(severity=severity, rule=rule, expected=expected, actual=actual)


def _telemetry_findings(host: str, samples: Samples) -> Iterable[Finding]:
    for note in samples.notes:
        rule = FOREIGN_PROCESS if note.startswith("foreign ") else "telemetry-note"
        yield _finding("warning", rule, "no remark of the sampler", f"{host}: {note}")
    if samples.malformed:
        yield _finding("warning", "telemetry-readable", "samples only", f"{host}: {samples.malformed} bad lines")
    for index, reasons in samples.throttle.items():
        held = sorted(reasons - {"idle", "gpu_idle", "none"})
        if held:
            actual = f"{host} device {index}: {', '.join(held)}"
            yield _finding("info", "clocks-free", "nothing holds the clocks down", actual)


def _log_findings(job: JobSpec, work: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    world = job.key.world_size
    if len(timeline.ranks) != world:
        yield _finding("error", "ranks-present", f"events of {world} ranks", f"events of {len(timeline.ranks)}")
    for end in timeline.ranks:
        if end.malformed:
            lines = ", ".join(map(str, end.malformed_lines))
            actual = f"rank {end.rank}: {end.malformed} bad lines" + (f" (lines {lines})" if lines else "")
            yield _finding("warning", "log-readable", "every PerfLog line is a record", actual)
        if end.torn:
            yield _finding("warning", "log-complete", "a whole last line", f"rank {end.rank}: its last line broke off")
    for warning in dict.fromkeys(warning for end in timeline.ranks for warning in end.warnings):
        yield _finding("warning", "rank-warning", "no warning", warning)
    if timeline.nonfinite_step is not None:
        yield _finding(
            "error", "loss-finite", "a finite loss at every step", f"step {timeline.nonfinite_step} has none"
        )
    yield from _flops_finding(timeline)
    yield from _reference_finding(work, timeline)


def _reference_finding(train: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    if train.reference_loss is None or train.settings.loader.synthetic:
        return
    limit = train.reference_loss.max_mean_relative_error
    error = reference_error(timeline, train)
    if error is None:
        actual = f"step {max(train.reference_loss.steps, default=0)} of it was not reached with a finite loss"
    elif error > limit:
        actual = f"it is {error:.2%} from it in the mean"
    else:
        return
    yield _finding("error", "reference-loss", f"a loss within {limit:.2%} of the reference curve", actual)


def _flops_finding(timeline: Timeline) -> Iterable[Finding]:
    finished = timeline.lead_end.finished
    counted, formula = (finished.flops_per_sample, finished.flops_per_sample_formula) if finished else (None, None)
    if counted and formula and abs(counted - formula) > FLOPS_TOLERANCE * formula:
        yield _finding("warning", "flops-by-formula", f"about {formula:.4g} FLOPs a sample", f"{counted:.4g} counted")
