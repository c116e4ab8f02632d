"""Compute the result of an inference round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from accelmark.results.figure_names import INFER_FIGURES, FigureName
from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.contention import contention_findings, is_busy
from accelmark.results.figures.curves import telemetry_series
from accelmark.results.figures.inference import PhaseFigures, invalid_reasons, mfu, phase_figures
from accelmark.results.figures.training import Figures, value
from accelmark.results.read.infer_log import InferLog, read_infer_log
from accelmark.results.read.round_dir import LedgerState, NodeDir, read_json
from accelmark.results.rounds.host_telemetry import read_telemetry
from accelmark.results.rounds.state import job_state
from accelmark.results.schema import Environment, Figure, Finding, InferenceRound, JobState, Mark, RoundResult, finding
from accelmark.spec.events import Phase, ScenarioResult
from accelmark.spec.inference import InferStep, ScenarioName
from accelmark.spec.job import InferJob, JobSpec

_STEP_TIMES: Final = {
    FigureName.VALIDATION_TIME: InferStep.VALIDATE,
    FigureName.EXPORT_TIME: InferStep.EXPORT,
    FigureName.COMPILE_TIME: InferStep.COMPILE,
    FigureName.INFERENCE_TIME: InferStep.INFER,
}
_STEP_OF_PHASE: Final[dict[Phase, InferStep]] = {"validation": InferStep.VALIDATE, "inference": InferStep.INFER}
_LATENCIES: Final = {
    FigureName.LATENCY_P50: "p50",
    FigureName.LATENCY_P90: "p90",
    FigureName.LATENCY_P99: "p99",
    FigureName.LATENCY_P999: "p99.9",
}
_SCENARIOS: Final[dict[FigureName, ScenarioName]] = {
    FigureName.OFFLINE_RATE: "offline",
    FigureName.SINGLE_STREAM_LATENCY: "single_stream",
    FigureName.MULTI_STREAM_LATENCY: "multi_stream",
    FigureName.SERVER_RATE: "server",
}
_CURVE_POINTS: Final = 100


def infer_round(job: JobSpec, infer: InferJob, nodes: list[NodeDir], ledger: LedgerState | None) -> RoundResult:
    """Compute the result of an inference round, also of one that failed, was lost or is incomplete.

    Args:
        job: the job.
        infer: its work.
        nodes: the directories of its hosts.
        ledger: the last state that the coordinator recorded.

    Raises:
        RunError: the rank's log cannot be read.
    """
    logs = [path for node in nodes for _, path in node.rank_logs()]
    log = read_infer_log(logs[0]) if logs else InferLog()
    rank_error = None
    if log.finished is not None and log.finished.state != "completed":
        rank_error = log.finished.message or log.finished.end_reason
    state, reason = job_state(job, nodes, rank_error, log.begin_ms is not None, ledger)
    findings: list[Finding] = []
    phase: Phase = "inference" if "inference" in log.spans_ms else "validation"
    spans = {}
    if logs and phase in log.spans_ms:
        begin_ms, end_ms = log.spans_ms[phase]
        spans[str(logs[0].parent)] = ((begin_ms / 1000, end_ms / 1000),)
    hosts, no_telemetry = read_telemetry(nodes, spans, findings)
    figures = _figures(job, infer, log, hosts, no_telemetry or "telemetry has no samples", phase)
    findings += _findings(infer, log, figures)
    findings += contention_findings(nodes, {0: log.finished})
    settings = infer.settings
    return RoundResult(
        key=job.key,
        task="infer",
        round=job.round,
        case_version=job.case_version,
        unit=infer.unit,
        state=state,
        reason=reason,
        converged=None,
        marks=_marks(job, infer, log, state, findings),
        vendor=job.vendor,
        chip=job.chip,
        precision=settings.precision,
        started_at=min((node.exit.started_at for node in nodes if node.exit), default=""),
        figures=figures,
        telemetry=telemetry_series(hosts),
        num_samples=sum(sum(window.items) for window in log.windows.get(phase, ())),
        inference=InferenceRound(
            compiler=settings.compiler,
            batch_size=settings.batch_size,
            metric=infer.metric,
            tolerance=infer.tolerance,
            stages=tuple(log.stages),
            repeat_check=log.repeat_check,
            scenarios=tuple(log.scenarios),
            latency_curve=_latency_curve(log, settings.batch_size),
        ),
        nodes=tuple(node.exit for node in nodes if node.exit),
        environment=Environment(
            hosts=tuple({"host": node.host} | read_json(node.path / "sys_info.json") for node in nodes),
            started=log.started.model_dump() if log.started else {},
        ),
        settings=job.provenance,
        findings=tuple(findings),
    )


def _figures(
    job: JobSpec, infer: InferJob, log: InferLog, hosts: HostSamples, no_telemetry: str, phase: Phase
) -> Figures:
    settings = infer.settings
    phases = {
        name: phase_figures(log.windows.get(name, ()), settings.batch_size, _absent(log, step))
        for name, step in _STEP_OF_PHASE.items()
    }
    inference, validation = phases["inference"], phases["validation"]
    metrics = {name: _metric(log, infer, name) for name in phases}
    e2e_s = (log.last_ms - log.begin_ms) / 1000 if log.begin_ms is not None else None
    warm_up = log.warm_ups.get("inference")
    absent = _absent(log, InferStep.INFER)
    not_checked = "repeat_check is false" if not settings.repeat_check else absent
    if log.repeat_check is not None:
        not_checked = log.repeat_check.reason or not_checked
    figures: Figures = {
        FigureName.INFERENCE_CORE: inference.core,
        FigureName.INFERENCE_WHOLE: inference.whole,
        FigureName.VALIDATION_CORE: validation.core,
        FigureName.VALIDATION_WHOLE: validation.whole,
        FigureName.INFERENCE_METRIC: metrics["inference"],
        FigureName.VALIDATION_METRIC: metrics["validation"],
        FigureName.METRIC_DIFFERENCE: _difference(metrics["inference"], metrics["validation"]),
        FigureName.FIRST_CALL: value(warm_up.first_call_ms if warm_up else None, absent),
        FigureName.FLOPS_PER_ITEM: value(settings.flops, "the case states no flops"),
        FigureName.REPEAT_SPEEDUP: value(log.repeat_check.speedup if log.repeat_check else None, not_checked),
        FigureName.DECLARED_SHARE: inference.declared,
        FigureName.E2E_TIME: value(e2e_s, "no rank wrote an event"),
    }
    figures |= {name: inference.latency_ms[share] for name, share in _LATENCIES.items()}
    figures |= {name: _step_time(log, step) for name, step in _STEP_TIMES.items()}
    scenarios = {result.scenario: result for result in log.scenarios}
    figures |= {name: _scenario(scenarios.get(scenario)) for name, scenario in _SCENARIOS.items()}
    figures |= _computation(job, infer, inference if inference.core.value is not None else validation)
    figures |= _memory(log, hosts)
    units = sum(sum(window.items) for window in log.windows.get(phase, ()))
    consumed, _ = consumption_figures(hosts, units, job.device_type, no_telemetry)
    figures |= consumed
    return {name: figures[name] for name in INFER_FIGURES}


def _absent(log: InferLog, step: InferStep) -> str:
    """Return why a step has no result."""
    stage = log.stage(step)
    if stage is not None and stage.reason:
        return stage.reason
    return f"the run did not complete step {step.number} ({step})"


def _metric(log: InferLog, infer: InferJob, phase: Phase) -> Figure:
    evaluation = log.evaluations.get(phase)
    if evaluation is None:
        return Figure(value=None, reason=_absent(log, _STEP_OF_PHASE[phase]))
    if not evaluation.metrics:
        what = "synthetic data" if infer.settings.synthetic else "untrained weights"
        return Figure(value=None, reason=f"{what} have no accuracy")
    return value(evaluation.metrics.get(infer.metric), f"the evaluation has no finite {infer.metric}")


def _difference(inference: Figure, validation: Figure) -> Figure:
    if inference.value is None or validation.value is None:
        return Figure(value=None, reason=inference.reason or validation.reason or "one of the two was not measured")
    return Figure(value=inference.value - validation.value)


def _step_time(log: InferLog, step: InferStep) -> Figure:
    stage = log.stage(step)
    if stage is None or stage.state != "done":
        return Figure(value=None, reason=_absent(log, step))
    return Figure(value=stage.duration_s)


def _scenario(result: ScenarioResult | None) -> Figure:
    if result is None:
        return Figure(value=None, reason="the scenario was not requested")
    notes = [result.reason] if result.reason else []
    if result.functional:
        notes.append("functional test: shorter than MLPerf requires")
    return Figure(value=result.figure, reason="; ".join(notes) or None)


def _computation(job: JobSpec, infer: InferJob, phase: PhaseFigures) -> Figures:
    settings = infer.settings
    peak = getattr(job.chip.peaks, settings.precision, None) if job.chip is not None else None
    achieved = None
    if phase.core.value is not None and settings.flops is not None:
        achieved = phase.core.value * settings.flops / 1e12
    why = phase.core.reason or "the case states no flops"
    return {
        FigureName.ACHIEVED_TFLOPS: value(achieved, why),
        FigureName.MFU: mfu(phase.core, settings.flops, peak),
    }


def _memory(log: InferLog, hosts: HostSamples) -> Figures:
    reported = [stage.details.get("peak_device_memory_mib") for stage in log.stages]
    peaks = [float(peak) for peak in reported if isinstance(peak, int | float)]
    totals: list[float] = []
    for samples, _ in hosts.values():
        for columns in samples.devices.values():
            peaks += [used for used in columns.get("memory_used_mib", ()) if used == used]
            totals += [total for total in columns.get("memory_total_mib", ()) if total == total]
    reason = "neither the runtime nor telemetry reports device memory"
    return {
        FigureName.PEAK_DEVICE_MEMORY: value(max(peaks, default=None), reason),
        FigureName.DEVICE_MEMORY_TOTAL: value(max(totals, default=None), reason),
    }


def _findings(infer: InferJob, log: InferLog, figures: Figures) -> Iterable[Finding]:
    nonfinite = sum(window.nonfinite_batches for windows in log.windows.values() for window in windows)
    for reason in invalid_reasons(
        metric=infer.metric,
        validation=figures[FigureName.VALIDATION_METRIC].value,
        inference=figures[FigureName.INFERENCE_METRIC].value,
        tolerance=infer.tolerance,
        reference=None if _is_partial(log) else infer.reference,
        nonfinite_batches=nonfinite,
        repeat_check=log.repeat_check,
    ):
        yield finding("error", "inference-accuracy", "", reason)
    notes = {str(note): note for note in infer.notes}
    for warning in dict.fromkeys(log.warnings):
        note = notes.get(warning)
        if note is None or note.severity == "warning":
            yield finding("warning", "rank-warning", "", warning)
        else:
            yield finding("info", "vendor-setting", "", warning)
    if log.invalid or log.report.malformed:
        yield finding("warning", "log-readable", "", f"{log.invalid + log.report.malformed} malformed PerfLog lines")


def _marks(
    job: JobSpec, infer: InferJob, log: InferLog, state: JobState, findings: Iterable[Finding]
) -> tuple[Mark, ...]:
    created = log.stage(InferStep.CREATE)
    untrained = created is not None and created.details.get("trained") is False
    marks: dict[Mark, bool] = {
        "open": job.open,
        "synthetic": infer.settings.synthetic or untrained,
        "partial": state != "succeeded",
        "partial_evaluation": not infer.settings.synthetic
        and (infer.settings.max_batches is not None or _is_partial(log)),
        "busy_machine": is_busy(findings),
    }
    return tuple(mark for mark, applies in marks.items() if applies)


def _is_partial(log: InferLog) -> bool:
    created = log.stage(InferStep.CREATE)
    return created is not None and created.details.get("partial") is True


def _latency_curve(log: InferLog, batch_size: int) -> tuple[tuple[float, float], ...]:
    """Return the distribution over full batches in steps of 1 %, in finer steps from 99 %."""
    ordered = sorted(
        latency
        for window in log.windows.get("inference", ())
        for count, latency in zip(window.items, window.latency_ms, strict=True)
        if count == batch_size
    )
    if not ordered:
        return ()
    last = len(ordered) - 1
    shares = [point / _CURVE_POINTS for point in range(_CURVE_POINTS)] + [
        1 - 10 ** (-nines / 10) for nines in range(20, 41)
    ]
    indices = sorted({round(last * share) for share in shares} | {last})
    return tuple(((index + 1) / len(ordered), round(ordered[index], 5)) for index in indices)
