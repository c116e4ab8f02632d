"""Compute the result of an inference round."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from accelmark.results.figure_names import GENERATION_FIGURES, INFER_FIGURES
from accelmark.results.figure_names import FigureName as F
from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.curves import telemetry_series
from accelmark.results.figures.inference import (
    PhaseFigures,
    crossing_share,
    full_batch_latencies,
    invalid_reasons,
    latency_curve,
    mfu,
    phase_figures,
)
from accelmark.results.figures.training import Figures, measured_ceiling, ratio, value
from accelmark.results.read.rank_log import InferLog, read_infer_log
from accelmark.results.read.round_dir import LedgerState, NodeDir
from accelmark.results.rounds.consistency import agreement_findings
from accelmark.results.rounds.generation import generation_round
from accelmark.results.rounds.hosts import contention_findings, host_infos, job_state, read_telemetry, round_marks
from accelmark.results.rounds.load import Consumption, load_span
from accelmark.results.schema import Environment, Figure, Finding, InferenceRound, RoundResult, finding
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.inference import Phase, ScenarioResult
from accelmark.spec.settings.inference import InferStep, ScenarioName

_STEP_TIMES: Final = {
    F.VALIDATION_TIME: InferStep.VALIDATE, F.EXPORT_TIME: InferStep.EXPORT, F.COMPILE_TIME: InferStep.COMPILE,
    F.INFERENCE_TIME: InferStep.INFER,
}  # fmt: skip
_STEP_OF_PHASE: Final[dict[Phase, InferStep]] = {"validation": InferStep.VALIDATE, "inference": InferStep.INFER}
_LATENCIES: Final = {F.LATENCY_P50: "p50", F.LATENCY_P90: "p90", F.LATENCY_P99: "p99", F.LATENCY_P999: "p99.9"}
_SCENARIOS: Final[dict[F, ScenarioName]] = {
    F.OFFLINE_RATE: "offline", F.SINGLE_STREAM_LATENCY: "single_stream", F.MULTI_STREAM_LATENCY: "multi_stream",
    F.SERVER_RATE: "server",
}  # fmt: skip


def infer_round(
    round_dir: Path, job: JobSpec, infer: InferJob, nodes: list[NodeDir], ledger: LedgerState | None
) -> RoundResult:
    """Compute the result of an inference round, also of one that failed, was lost or is incomplete.

    ``ledger`` is the last state that the coordinator recorded. Raises RunError if the rank's log cannot be read.
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
    num_items = sum(sum(window.items) for window in log.windows.get(phase, ()))
    figures = _figures(job, infer, log, hosts)
    figures |= consumption_figures(hosts, num_items, job.device_type, no_telemetry)[0]
    generated = None
    if infer.settings.generate_batches:
        generated = generation_round(
            job, infer, log, logs[0].parent if logs else None, Consumption(hosts, no_telemetry)
        )
        figures |= generated.figures
    is_partial = log.created("partial") is True
    findings += _findings(infer, log, figures, is_partial=is_partial)
    findings += contention_findings(nodes, {0: log.finished})
    findings += agreement_findings(round_dir, job, nodes, {str(path.parent): log.times for path in logs[:1]}, hosts)
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
        marks=round_marks(
            job,
            state,
            findings,
            synthetic=settings.synthetic or log.created("trained") is False,
            partial_evaluation=not settings.synthetic and (settings.max_batches is not None or is_partial),
        ),
        vendor=job.vendor,
        chip=job.chip,
        precision=settings.precision,
        started_at=min((node.exit.started_at for node in nodes if node.exit), default=""),
        figures={name: figures[name] for name in (*INFER_FIGURES, *(GENERATION_FIGURES if generated else ()))},
        curves=generated.curves if generated else {},
        num_devices=job.key.nproc,
        telemetry=telemetry_series(hosts, load_span(log.loads)),
        num_samples=num_items,
        role=job.role,
        inference=InferenceRound(
            compiler=settings.compiler,
            batch_size=settings.batch_size,
            metric=infer.metric,
            metric_title=infer.metric_title,
            tolerance=infer.tolerance,
            stages=tuple(log.stages),
            repeat_check=log.repeat_check,
            answers=log.answers,
            crossing_share=crossing_share(log.windows.get("inference", ())),
            isolated=log.started is not None and log.started.isolated,
            scenarios=tuple(log.scenarios),
            latency_curve=latency_curve(full_batch_latencies(log.windows.get("inference", ()), settings.batch_size)),
        ),
        serving=generated.serving if generated else None,
        nodes=tuple(node.exit for node in nodes if node.exit),
        environment=Environment(hosts=host_infos(nodes), started=log.started.model_dump() if log.started else {}),
        settings=job.provenance,
        findings=tuple(findings),
    )


def _figures(job: JobSpec, infer: InferJob, log: InferLog, hosts: HostSamples) -> Figures:
    settings = infer.settings
    phases = {
        name: phase_figures(log.windows.get(name, ()), settings.batch_size, _absent(log, step))
        for name, step in _STEP_OF_PHASE.items()
    }
    inference, validation = phases["inference"], phases["validation"]
    e2e_s = (log.last_ms - log.begin_ms) / 1000 if log.begin_ms is not None else None
    warm_up, check = log.warm_ups.get("inference"), log.repeat_check
    absent = _absent(log, InferStep.INFER)
    not_checked = (check.reason if check else None) or (
        "repeat_check is false" if not settings.repeat_check else absent
    )
    scenarios = {result.scenario: result for result in log.scenarios}
    return {
        F.INFERENCE_CORE: inference.core,
        F.INFERENCE_WHOLE: inference.whole,
        F.VALIDATION_CORE: validation.core,
        F.VALIDATION_WHOLE: validation.whole,
        F.INFERENCE_METRIC: _metric(log, infer, "inference"),
        F.VALIDATION_METRIC: _metric(log, infer, "validation"),
        **_compared(log, infer),
        F.FIRST_CALL: value(warm_up.first_call_ms if warm_up else None, absent),
        F.FLOPS_PER_ITEM: value(settings.flops, "the case states no flops"),
        F.REPEAT_SPEEDUP: value(check.speedup if check else None, (check.reason if check else None) or not_checked),
        F.DECLARED_SHARE: inference.declared,
        F.E2E_TIME: value(e2e_s, "no rank wrote an event"),
        **{name: inference.latency_ms[share] for name, share in _LATENCIES.items()},
        **{name: _step_time(log, step) for name, step in _STEP_TIMES.items()},
        **{name: _scenario(scenarios.get(scenario)) for name, scenario in _SCENARIOS.items()},
        **(
            _computation(job, infer, inference, job.key.nproc)
            if inference.core.value is not None
            else _computation(job, infer, validation, 1)
        ),
        **_memory(job, log, hosts),
    }


def _absent(log: InferLog, step: InferStep) -> str:
    """Return why a step has no result."""
    stage = log.stage(step)
    if stage is not None and stage.reason:
        return stage.reason
    return f"the run did not complete step {step.number} ({step})"


def _metric(log: InferLog, infer: InferJob, phase: Phase) -> Figure:
    evaluation = log.evaluations.get(phase)
    if evaluation is None:
        return value(None, _absent(log, _STEP_OF_PHASE[phase]))
    if not evaluation.metrics:
        return value(None, f"{'synthetic data' if infer.settings.synthetic else 'untrained weights'} have no accuracy")
    return value(evaluation.metrics.get(infer.metric), f"the evaluation has no finite {infer.metric}")


def _compared(log: InferLog, infer: InferJob) -> Figures:
    """Return the metrics of engine and framework over the same inputs, and their difference.

    Earlier versions did not record the engine's: then the difference is that of the metrics over all passes and over
    the data.
    """
    whole, data = (_metric(log, infer, phase) for phase in ("inference", "validation"))
    absent = whole.reason or "the framework's answers to the engine's inputs have no metric"
    answers = log.answers
    engine, framework = (
        answered.get(infer.metric)
        for answered in ((answers.engine_metrics, answers.framework_metrics) if answers else ({}, {}))
    )
    difference = None if engine is None or framework is None else engine - framework
    note = f"over {answers.num_scored:,} inputs, the same in both" if answers and answers.num_scored else None
    if answers is None or not answers.engine_metrics:
        expected = data.value if framework is None else framework
        difference = None if whole.value is None or expected is None else whole.value - expected
        note = "over different inputs"
    return {
        name: value(None, absent) if found is None else Figure(value=found, reason=note)
        for name, found in (
            (F.ENGINE_METRIC, engine), (F.FRAMEWORK_METRIC, framework), (F.METRIC_DIFFERENCE, difference),
        )
    }  # fmt: skip


def _step_time(log: InferLog, step: InferStep) -> Figure:
    stage = log.stage(step)
    return value(stage.duration_s if stage and stage.state == "done" else None, _absent(log, step))


def _scenario(result: ScenarioResult | None) -> Figure:
    if result is None:
        return value(None, "the scenario was not requested")
    notes = [result.reason] if result.reason else []
    if result.functional:
        notes.append("functional test: shorter than MLPerf requires")
    return Figure(value=result.figure, reason="; ".join(notes) or None)


def _computation(job: JobSpec, infer: InferJob, phase: PhaseFigures, num_devices: int) -> Figures:
    rate = phase.core.value
    flops = infer.settings.flops / num_devices if infer.settings.flops is not None else None
    peak = getattr(job.chip.peaks, infer.settings.precision, None) if job.chip is not None else None
    ceiling, why_no_ceiling = measured_ceiling(job, infer.settings.precision)
    why_not = phase.core.reason or "the case states no flops"
    achieved = None if rate is None or flops is None else rate * flops / 1e12
    return {
        F.ACHIEVED_TFLOPS: value(achieved, why_not),
        F.MFU: mfu(phase.core, flops, peak),
        F.MFU_MEASURED: ratio(achieved, ceiling, why_not if achieved is None else why_no_ceiling),
    }


def _memory(job: JobSpec, log: InferLog, hosts: HostSamples) -> Figures:
    """Return the peak of the devices, or of the computing process where it computes on the CPU, and their memory."""
    is_cpu = job.device_type == "cpu" and log.started is not None and log.started.counts_own_memory
    computed = log.stage(InferStep.INFER if "inference" in log.spans_ms else InferStep.VALIDATE)
    of = ([computed] if computed is not None else []) if is_cpu else log.stages
    reported = [stage.details.get(f"peak_{'host' if is_cpu else 'device'}_memory_mib") for stage in of]
    peaks = [float(peak) for peak in reported if isinstance(peak, int | float)]
    totals: list[float] = []
    for samples, _ in hosts.values():
        for columns in samples.devices.values():
            if not is_cpu:  # other processes use the host's memory too
                peaks += [used for used in columns.get("memory_used_mib", ()) if used == used]
            totals += [total for total in columns.get("memory_total_mib", ()) if total == total]
    reason = "neither the runtime nor telemetry reports device memory"
    return {
        F.PEAK_DEVICE_MEMORY: value(max(peaks, default=None), reason),
        F.DEVICE_MEMORY_TOTAL: value(max(totals, default=None), reason),
    }


def _findings(infer: InferJob, log: InferLog, figures: Figures, *, is_partial: bool) -> Iterable[Finding]:
    nonfinite = sum(window.nonfinite_batches for windows in log.windows.values() for window in windows)
    for reason in invalid_reasons(
        metric=infer.metric,
        validation=figures[F.VALIDATION_METRIC].value,
        inference=figures[F.INFERENCE_METRIC].value,
        tolerance=infer.tolerance,
        reference=None if is_partial else infer.reference,
        nonfinite_batches=nonfinite,
        repeat_check=log.repeat_check,
        answers=log.answers,
        precision=infer.settings.precision,
    ):
        yield finding("error", "inference-accuracy", "", reason)
    notes = {str(note): note for note in infer.notes}
    for warning in dict.fromkeys(log.warnings):
        note = notes.get(warning)
        if note is None or note.severity == "warning":
            yield finding("warning", "rank-warning", "", warning)
        else:
            yield finding("info", "vendor-setting", "", warning)
    if log.malformed:
        yield finding("warning", "log-readable", "", f"{log.malformed} malformed PerfLog lines")
