"""Compute the result of an inference round, and the reasons that make it invalid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from accelmark.results import schema
from accelmark.results.figures import FigureName as F
from accelmark.results.figures import figures_of
from accelmark.results.read.rank_log import InferLog, read_log
from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.consumption import HostSamples, consumption_figures, device_memory, telemetry_series
from accelmark.results.rounds.hosts import agreement_findings, contention_findings, job_state, read_telemetry, round_of
from accelmark.results.rounds.load import latency_curve
from accelmark.results.rounds.serving import generation_round, load_span
from accelmark.results.rounds.training import measured_ceiling
from accelmark.results.schema import PERCENTILES, Figure, Figures, Finding, finding, ratio, value
from accelmark.spec.backports import zip_strict
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, Phase, RepeatCheck
from accelmark.spec.number_format import limit_percent, percent
from accelmark.spec.settings.inference import ANSWER_LIMITS, InferPrecision, InferStep, ScenarioName


class PhaseFigures(NamedTuple):
    """Speed of one phase: validation or inference."""

    whole: Figure
    """Items per second with data loading and evaluation."""
    core: Figure
    """Items per second of computation and copies to and from the device."""
    latency_ms: Mapping[str, Figure]
    """Percentiles over full batches."""
    declared: Figure
    """Share of the calls' time that the engine declared as not inference."""


def phase_figures(windows: Sequence[ForwardWindow], batch_size: int, absent: str) -> PhaseFigures:
    """Return the figures of one phase; ``absent`` is the reason where it has no windows."""
    items = sum(sum(window.items) for window in windows)
    if not items:
        none = Figure(value=None, reason=absent)
        return PhaseFigures(none, none, dict.fromkeys(PERCENTILES, none), none)
    other_ms = sum(sum(window.not_inference_ms) for window in windows)
    wall_ms = sum(window.wall_ms for window in windows) - other_ms
    core_ms = sum(_computed_ms(window) for window in windows)
    latencies = full_batch_latencies(windows, batch_size)

    def rate(took_ms: float) -> Figure:
        return value(items / (took_ms / 1000) if took_ms > 0 else None, "the engine declared all time as not inference")

    percentiles = {name: percentile(latencies, share) for name, share in PERCENTILES.items()}
    declared = Figure(value=other_ms / (other_ms + core_ms) if other_ms + core_ms > 0 else 0.0)
    return PhaseFigures(whole=rate(wall_ms), core=rate(core_ms), latency_ms=percentiles, declared=declared)


def _computed_ms(window: ForwardWindow) -> float:
    return sum(window.latency_ms) if window.computed_ms is None else window.computed_ms


def crossing_share(windows: Sequence[ForwardWindow]) -> float | None:
    """Return the part of the windows that is outside of the engine's calls; None where it was not measured."""
    crossings = [window.crossing_ms for window in windows if window.crossing_ms is not None]
    total_ms = sum(_computed_ms(window) + sum(window.not_inference_ms) for window in windows)
    return sum(crossings) / total_ms if crossings and total_ms > 0 else None


def full_batch_latencies(windows: Iterable[ForwardWindow], batch_size: int) -> list[float]:
    """Return the latency in ms of each full batch, sorted."""
    batches = (batch for window in windows for batch in zip_strict(window.items, window.latency_ms))
    return sorted(latency for count, latency in batches if count == batch_size)


def percentile(ordered: Sequence[float], share: float) -> Figure:
    """Return the nearest-rank percentile; null where there are too few values for one to exceed it."""
    needed = math.ceil(1 / (1 - share) - 1e-9)
    if len(ordered) < needed:
        return Figure(value=None, reason=f"needs {needed} full batches, {len(ordered)} were measured")
    return Figure(value=ordered[math.ceil(share * len(ordered) - 1e-9) - 1])


def mfu(items_per_s: Figure, flops_per_item: float | None, peak_tflops: float | None) -> Figure:
    """Return the model's FLOP/s over the chip's dense peak for the precision used."""
    if items_per_s.value is None:
        return items_per_s
    if flops_per_item is None or peak_tflops is None:
        why = "the case states no flops" if flops_per_item is None else "the chip's peak at this precision is unknown"
        return Figure(value=None, reason=why)
    return Figure(value=items_per_s.value * flops_per_item / (peak_tflops * 1e12))


def invalid_reasons(
    infer: InferJob,
    *,
    validation: float | None,
    inference: float | None,
    is_partial: bool,
    nonfinite_batches: int,
    repeat_check: RepeatCheck | None,
    answers: AnswerCheck | None = None,
) -> tuple[str, ...]:
    """Return the reasons that make an inference run invalid.

    ``validation`` is the framework's metric on the data, ``inference`` the engine's over all its inputs, which differ
    slightly from the data; ``answers`` has the metrics of both on the same inputs. NaN is invalid; a metric that was
    not measured (None) is not, the rule ``accuracy-missed`` covers it. The reference is of all data, not of a part.
    """
    metric, tolerance, reference = infer.metric, infer.tolerance, None if is_partial else infer.reference
    reasons = [f"{nonfinite_batches} batches have NaN or infinite outputs"] if nonfinite_batches else []
    for phase, measured in (("validation", validation), ("inference", inference)):
        if measured is not None and not math.isfinite(measured):
            reasons.append(f"{metric} of {phase} is not finite")
    compared = answers.engine_metrics.get(metric) if answers is not None else None
    expected = answers.framework_metrics.get(metric) if answers is not None else None
    framework = validation if expected is None else expected
    for inputs, engine in (("the same inputs", compared), ("all inputs", inference)):
        if framework is not None and engine is not None and not abs(framework - engine) <= tolerance:
            other = f"{framework:.4f} in the framework, a difference of more than {tolerance:g}"
            reasons.append(f"{metric} is {engine:.4f} in the engine on {inputs} and {other}")
            break
    measured = validation if validation is not None else inference
    if reference is not None and measured is not None and not abs(measured - reference.value) <= reference.within:
        stated = f"{reference.value:.4f} ± {reference.within:g} ({reference.source})"
        reasons.append(f"{metric} is {measured:.4f}, the reference is {stated}")
    if repeat_check is not None and repeat_check.suspicious:
        median = f"(median of {repeat_check.num_batches} batches, limit {repeat_check.limit:g})"
        faster = f"{repeat_check.speedup:.2f} times as fast as new ones {median}"
        reasons.append(f"repeated items run {faster}: outputs may be cached")
    if answers is not None and not nonfinite_batches:
        reasons += answer_reasons(answers, infer.settings.precision)
    return tuple(reasons)


def answer_reasons(answers: AnswerCheck, precision: InferPrecision, where: str = "") -> list[str]:
    """Return why an engine's answers are not the model's in ``precision``; empty where they are."""
    limits = ANSWER_LIMITS[precision]
    if not answers.num_items:
        return []
    reasons: list[str] = []
    for name, error, limit in (
        ("median", answers.median_error, limits.median_error), ("largest", answers.worst_error, limits.worst_error),
    ):  # fmt: skip
        if error is None or error > limit:
            value = "not finite" if error is None else f"{error:.2g}"
            told = f"{value} (limit for {precision}: {limit:g}), against the framework's on {answers.num_items} inputs"
            reasons.append(f"the {name} error of the engine's answers{where} is {told}")
    if answers.top1_agreement is not None and answers.top1_agreement < limits.top1_agreement:
        share = percent(answers.top1_agreement, 4)
        actual = f"the engine's answers{where} have the framework's largest value in {share} of"
        reasons.append(f"{actual} the cases, at least {limit_percent(limits.top1_agreement)} expected for {precision}")
    if answers.sensitivity is not None and not limits.sensitivity <= answers.sensitivity:
        actual = f"the engine's answers follow small changes of the input by {percent(answers.sensitivity)}"
        reasons.append(f"{actual} (at least {limit_percent(limits.sensitivity)} expected): they may be looked up")
    return reasons


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


def infer_round(round_dir: Path, job: JobSpec, infer: InferJob, nodes: list[NodeDir]) -> schema.RoundResult:
    """Compute the result of an inference round, even if it failed, was lost or is incomplete."""
    logs = [path for node in nodes for _, path in node.rank_logs()]
    log = read_log(logs[0], InferLog) if logs else InferLog()
    failed = log.finished if log.finished is not None and log.finished.state != "completed" else None
    rank_error = None if failed is None else failed.message or failed.end_reason
    state = job_state(round_dir, job, nodes, rank_error, has_events=log.begin_ms is not None)
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
    generated: schema.ServingRound | None = None
    curves: dict[str, tuple[schema.Point, ...]] = {}
    if infer.settings.generate_batches:
        node_dir = logs[0].parent if logs else round_dir
        generated, of_text, curves = generation_round(job, infer, log, node_dir, hosts, no_telemetry)
        figures |= of_text
    is_partial = log.created("partial") is True
    findings += _findings(infer, log, figures, is_partial=is_partial)
    findings += contention_findings(nodes, {0: log.finished})
    findings += agreement_findings(round_dir, job, nodes, {str(path.parent): log.times for path in logs[:1]}, hosts)
    settings, windows = infer.settings, log.windows.get("inference", ())
    inference = schema.InferenceRound(
        compiler=settings.compiler,
        batch_size=settings.batch_size,
        metric=infer.metric,
        metric_title=infer.metric_title,
        tolerance=infer.tolerance,
        stages=tuple(log.stages),
        repeat_check=log.repeat_check,
        answers=log.answers,
        crossing_share=crossing_share(windows),
        isolated=log.started is not None and log.started.isolated,
        scenarios=tuple(log.scenarios),
        latency_curve=latency_curve(full_batch_latencies(windows, settings.batch_size)),
    )
    return round_of(
        job,
        state,
        nodes,
        findings,
        {"started": log.started},
        synthetic=settings.synthetic or log.created("trained") is False,
        partial_evaluation=not settings.synthetic and (settings.max_batches is not None or is_partial),
        task="infer",
        figures={name: figures[name] for name in figures_of("infer", *(("generate",) if generated else ()))},
        curves=curves,
        num_devices=job.key.nproc,
        telemetry=telemetry_series(hosts, load_span(log.loads)),
        num_samples=num_items,
        inference=inference,
        serving=generated,
    )


def _figures(job: JobSpec, infer: InferJob, log: InferLog, hosts: HostSamples) -> Figures:
    settings = infer.settings
    inference, validation = (
        phase_figures(log.windows.get(name, ()), settings.batch_size, _absent(log, _STEP_OF_PHASE[name]))
        for name in ("inference", "validation")
    )
    e2e_s = (log.last_ms - log.begin_ms) / 1000 if log.begin_ms is not None else None
    warm_up, check = log.warm_ups.get("inference"), log.repeat_check
    absent = _absent(log, InferStep.INFER)
    not_checked = absent if settings.repeat_check else "repeat_check is false"
    figures: Figures = {
        F.INFERENCE_CORE: inference.core,
        F.INFERENCE_WHOLE: inference.whole,
        F.VALIDATION_CORE: validation.core,
        F.VALIDATION_WHOLE: validation.whole,
        F.INFERENCE_METRIC: _metric(log, infer, "inference"),
        F.VALIDATION_METRIC: _metric(log, infer, "validation"),
        F.FIRST_CALL: value(warm_up.first_call_ms if warm_up else None, absent),
        F.FLOPS_PER_ITEM: value(settings.flops, "the case states no flops"),
        F.REPEAT_SPEEDUP: value(check.speedup if check else None, (check.reason if check else None) or not_checked),
        F.DECLARED_SHARE: inference.declared,
        F.E2E_TIME: value(e2e_s, "no rank wrote an event"),
    }
    figures |= _compared(log, infer) | {name: inference.latency_ms[share] for name, share in _LATENCIES.items()}
    for name, step in _STEP_TIMES.items():
        stage = log.stage(step)
        took_s = stage.duration_s if stage and stage.state == "done" else None
        figures[name] = value(took_s, _absent(log, step))
    scenarios = {result.scenario: result for result in log.scenarios}
    for name, scenario in _SCENARIOS.items():
        result = scenarios.get(scenario)
        notes = [] if result is None else [result.reason or ""]
        if result is not None and result.functional:
            notes.append("functional test: shorter than MLPerf requires")
        note = "; ".join(filter(None, notes)) if result is not None else "the scenario was not requested"
        figures[name] = Figure(value=result.figure if result is not None else None, reason=note or None)
    computed, num_devices = (inference, job.key.nproc) if inference.core.value is not None else (validation, 1)
    rate, flops = computed.core.value, settings.flops / num_devices if settings.flops is not None else None
    peak = getattr(job.chip.peaks, settings.precision, None) if job.chip is not None else None
    ceiling, why_no_ceiling = measured_ceiling(job, settings.precision)
    why_not = computed.core.reason or "the case states no flops"
    achieved = None if rate is None or flops is None else rate * flops / 1e12
    figures |= {F.ACHIEVED_TFLOPS: value(achieved, why_not), F.MFU: mfu(computed.core, flops, peak)}
    figures[F.MFU_MEASURED] = ratio(achieved, ceiling, why_not if achieved is None else why_no_ceiling)
    return figures | _memory(job, log, hosts)


def _absent(log: InferLog, step: InferStep) -> str:
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
    whole, data = (_metric(log, infer, phase) for phase in ("inference", "validation"))
    absent = whole.reason or "the framework's answers to the engine's inputs have no metric"
    answers = log.answers
    engine = answers.engine_metrics.get(infer.metric) if answers else None
    framework = answers.framework_metrics.get(infer.metric) if answers else None
    difference = None if engine is None or framework is None else engine - framework
    note = f"over {answers.num_scored:,} inputs, the same in both" if answers and answers.num_scored else None
    if answers is None or not answers.engine_metrics:
        expected = data.value if framework is None else framework
        difference = None if whole.value is None or expected is None else whole.value - expected
        note = "over different inputs"
    metrics = {F.ENGINE_METRIC: engine, F.FRAMEWORK_METRIC: framework, F.METRIC_DIFFERENCE: difference}
    return {
        name: value(None, absent) if metric is None else Figure(value=metric, reason=note)
        for name, metric in metrics.items()
    }


def _memory(job: JobSpec, log: InferLog, hosts: HostSamples) -> Figures:
    """Return the peak of the devices, or of the computing process where it computes on the CPU, and their memory."""
    is_cpu = job.device_type == "cpu" and log.started is not None and log.started.counts_own_memory
    computed = log.stage(InferStep.INFER if "inference" in log.spans_ms else InferStep.VALIDATE)
    of = ([computed] if computed is not None else []) if is_cpu else log.stages
    reported = [stage.details.get(f"peak_{'host' if is_cpu else 'device'}_memory_mib") for stage in of]
    peaks = [float(peak) for peak in reported if isinstance(peak, (int, float))]
    used, note = (None, None) if is_cpu else device_memory(hosts, job.device_type)  # others use the host's memory too
    peak = max([*peaks, *([] if used is None else [used])], default=None)
    totals = [total for samples, _ in hosts.values() for total in samples.readings("memory_total_mib")]
    reason = "neither the runtime nor telemetry reports device memory"
    used_most = Figure(value=peak, reason=reason if peak is None else note)
    return {F.PEAK_DEVICE_MEMORY: used_most, F.DEVICE_MEMORY_TOTAL: value(max(totals, default=None), reason)}


def _findings(infer: InferJob, log: InferLog, figures: Figures, *, is_partial: bool) -> Iterable[Finding]:
    for reason in invalid_reasons(
        infer,
        validation=figures[F.VALIDATION_METRIC].value,
        inference=figures[F.INFERENCE_METRIC].value,
        is_partial=is_partial,
        nonfinite_batches=sum(window.nonfinite_batches for windows in log.windows.values() for window in windows),
        repeat_check=log.repeat_check,
        answers=log.answers,
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
        yield finding("warning", "log-unreadable", "", f"{log.malformed} malformed PerfLog lines")
