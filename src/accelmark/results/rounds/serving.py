"""Compute the results of serving and of offline generation, the two kinds of rounds with stages of load.

The table of figures has the formulas of generation. FLOPs follow Kaplan et al. 2020 (arXiv:2001.08361, section 2.1) and
Chowdhery et al. 2022 (arXiv:2204.02311, appendix B); the prefill computes the output layer once for each prompt. With
several devices (tensor parallelism), rates and the KV cache are those of all together, and MFU and MBU are relative to
the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from accelmark.results import schema
from accelmark.results.figures import FigureName as F
from accelmark.results.figures import figures_of
from accelmark.results.read.rank_log import EndedStage, InferLog, ServeLog, read_log
from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds import load
from accelmark.results.rounds.consumption import HostSamples, consumption_figures, device_memory, telemetry_series
from accelmark.results.rounds.hosts import agreement_findings, contention_findings, job_state, read_telemetry, round_of
from accelmark.results.rounds.load import Requests, counted, curves_of, read_requests
from accelmark.results.schema import Figure, Figures, Finding, finding, value
from accelmark.spec.job import InferJob, JobSpec, ServeJob
from accelmark.spec.log.inference import ANSWERS_FILE, REQUESTS_FILE
from accelmark.spec.settings.inference import InferStep
from accelmark.spec.settings.serving import ServeSettings, TokenScenario, generation_load
from accelmark.spec.settings.training import Scalar

_PERCENTILES: Final = {
    F.TTFT_P50: ("ttft", "p50"), F.TTFT_P99: ("ttft", "p99"), F.TPOT_P50: ("tpot", "p50"), F.TPOT_P99: ("tpot", "p99"),
    F.ITL_P99: ("itl", "p99"),
}  # fmt: skip
_SCENARIOS: Final[dict[F, TokenScenario]] = {
    F.LOADGEN_SERVER_TOKENS: "server", F.LOADGEN_OFFLINE_TOKENS: "offline",
}  # fmt: skip
_RATES: Final = {
    F.OUTPUT_RATE: "output_token_rate", F.OUTPUT_RATE_PER_DEVICE: "token_rate_per_device",
    F.OUTPUT_RATE_PER_USER: "token_rate_per_user", F.REQUEST_RATE: "request_rate",
}  # fmt: skip
_GENERATION: Final = {
    F.PREFILL_RATE: "prefill_token_rate", F.DECODE_RATE: "decode_token_rate", F.KV_CACHE: "kv_cache_mib",
    F.PREFILL_MFU: "prefill_mfu", F.DECODE_MFU: "decode_mfu", F.DECODE_MBU: "decode_mbu",
}  # fmt: skip


_ENERGY: Final = {
    "mean_power_w": F.MEAN_POWER, "joules_per_token": F.ENERGY_PER_UNIT, "tokens_per_joule": F.UNITS_PER_JOULE,
}  # fmt: skip


class MeasuredStage(NamedTuple):
    """A stage, the figures from telemetry in its window, warnings about them, and its output tokens."""

    stage: schema.ServingStage
    used: Figures
    notes: list[str]
    num_tokens: int


def measured_stages(
    job: JobSpec,
    loads: Sequence[EndedStage],
    requests: Requests,
    settings: ServeSettings,
    num_devices: int,
    hosts: HostSamples,
    no_telemetry: str,
) -> Iterator[tuple[MeasuredStage, Requests]]:
    """Yield the stages of a load, with the energy in their windows, and their requests, which are large."""
    for ended in loads:
        chosen, begin_s = requests.where(requests.stage == ended.load.stage), ended.load.begin_mono_s
        stage = load.measured_stage(chosen, ended.load, settings, num_devices, ended.mono_s - begin_s)
        if stage.window_s is None:
            tokens, (used, notes) = 0, consumption_figures({}, 0, job.device_type, stage.reasons[0])
        else:
            span = begin_s + stage.window_s[0], begin_s + stage.window_s[1]
            tokens = round((stage.output_token_rate or 0.0) * (span[1] - span[0]))
            of_span = {host: (samples, (span,)) for host, (samples, _) in hosts.items()}
            used, notes = consumption_figures(of_span, tokens, job.device_type, no_telemetry)
        stage = stage.model_copy(update={field: used[name].value for field, name in _ENERGY.items()})
        yield MeasuredStage(stage, used, notes, tokens), chosen


def headline_of(stages: Sequence[schema.ServingStage], *, has_slo: bool) -> tuple[int | None, str]:
    """Return the stage with the round's figures, and how it was chosen."""
    measured = [stage for stage in stages if stage.output_token_rate is not None and stage.scenario is None]
    if not measured:
        return None, "no stage has a rate of output tokens"
    holding = [stage for stage in measured if stage.holds_slo]
    if has_slo and not holding:
        best = max(measured, key=lambda stage: stage.slo_share or 0.0)
        return best.stage, "no stage holds the SLO: the stage in which the largest share of requests does"
    best = max(holding if has_slo else measured, key=lambda stage: stage.output_token_rate or 0.0)
    which = "that holds the SLO" if has_slo else "there is no SLO"
    return best.stage, f"the stage with the highest rate of output tokens{' ' if has_slo else '; '}{which}"


def serving_round(
    settings: ServeSettings,
    recorded: tuple[Requests, int],
    node_dir: Path,
    stages: Sequence[schema.ServingStage],
    *,
    has_slo: bool,
    min_agreement: float,
    **own: Any,
) -> schema.ServingRound:
    """Return the stages of a load with the answers, prompts and scores; ``recorded`` has the malformed requests."""
    requests, malformed = recorded
    answers, scores, unread = load.read_comparisons(node_dir)
    headline, why = headline_of(stages, has_slo=has_slo)
    return schema.ServingRound(
        api=settings.api,
        output_length="pinned" if settings.is_pinned else "natural",
        slo=settings.slo,
        stages=tuple(stages),
        headline=headline,
        headline_why=why,
        answers=load.compared_answers(answers, requests, settings.num_compared, min_agreement),
        prompts=load.prompt_use(requests),
        scores=tuple(scores),
        timeline=() if headline is None else load.timeline_of(requests.where(requests.stage == headline)),
        malformed_lines=malformed + unread,
        **own,
    )


def stage_figures(serving: schema.ServingRound, absent: str, num_compared: str) -> Figures:
    """Return the figures of the headline stage, LoadGen's scenarios and the answers."""
    stage, answers = serving.headline_stage, serving.answers
    figures = {name: value(getattr(stage, field) if stage else None, absent) for name, field in _RATES.items()}
    for name, (latency, percentile) in _PERCENTILES.items():
        distribution = stage.latencies.get(latency) if stage is not None else None
        quantile = distribution.quantiles.get(percentile) if distribution is not None else None
        figures[name] = value(quantile.value if quantile else None, (quantile.reason if quantile else None) or absent)
    results = {result.scenario: result for result in serving.scenarios}
    for name, scenario in _SCENARIOS.items():
        result = results.get(scenario)
        why = (result.reason if result else "the scenario was not requested") or "LoadGen reported none"
        figures[name] = value(result.tokens_per_second if result else None, why)
    not_compared = "no answer was compared" if answers.num_promised else f"{num_compared} is 0"
    return figures | {F.ANSWER_AGREEMENT: value(answers.agreement, not_compared)}


def load_span(ended: Sequence[EndedStage]) -> tuple[float, float] | None:
    """Return begin and end of all stages in seconds of their host's monotonic clock; None without a stage."""
    if not ended:
        return None
    last = ended[-1].load
    return ended[0].load.begin_mono_s, last.begin_mono_s + last.duration_s


_NO_LIMITS: Final = "the SLO has no limits"


def serve_round(round_dir: Path, job: JobSpec, serve: ServeJob, nodes: list[NodeDir]) -> schema.RoundResult:
    """Compute the result of a serving round, even if it failed, was lost or is incomplete."""
    logs = [path for node in nodes for _, path in node.rank_logs()]
    log = read_log(logs[0], ServeLog) if logs else ServeLog()
    node_dir, settings = logs[0].parent if logs else round_dir, serve.settings
    requests, lines = read_requests(node_dir / REQUESTS_FILE)
    ended = [stage for stage in log.stages if stage.load.stage >= 0]
    error = None if ended else "no stage of the load was measured"
    if log.finished is None:
        error = "the rank wrote no event FINISHED" if log.begin_ms is not None else None
    elif log.finished.state != "completed":
        error = log.finished.message or log.finished.end_reason
    state = job_state(round_dir, job, nodes, error, has_events=log.begin_ms is not None)
    findings: list[Finding] = []
    span = load_span(ended)
    hosts: HostSamples = {}
    no_telemetry = "the endpoint's machine records no telemetry"
    if settings.endpoint is None:
        hosts, no_telemetry = read_telemetry(nodes, {str(node_dir): (span,)} if span else {}, findings)
        no_telemetry = no_telemetry if ended else "no stage of the load was measured"
    num_devices = log.started.num_devices if log.started else job.key.nproc
    timed = measured_stages(job, ended, requests, settings, num_devices, hosts, no_telemetry)
    measured = [one for one, _ in timed]
    stages = [one.stage for one in measured]
    rate, note = _highest_rate(stages, has_slo=settings.slo.has_limits)
    reported = ("served_model", "command", "start_s", "start", "server_cores", "client_cores", "has_tokenizer")
    unknown: dict[str, Any] = {"served_model": settings.served_model, "has_tokenizer": False}
    options = settings.server_options
    serving = serving_round(
        settings,
        (requests, lines.malformed),
        node_dir,
        stages,
        scenarios=tuple(log.scenarios),
        has_slo=settings.slo.has_limits,
        min_agreement=serve.min_agreement,
        num_devices=num_devices,
        server=serve.server.name if serve.server else None,
        endpoint=settings.endpoint,
        load=log.finished.load if log.finished else None,
        facts={fact: options.get(option) for fact, option in serve.server.facts.items()} if serve.server else {},
        highest_rate=rate,
        highest_rate_note=note,
        **({name: getattr(log.started, name) for name in reported} if log.started else unknown),
    )
    findings += [finding("warning", "rank-warning", "", warning) for warning in dict.fromkeys(log.warnings)]
    if log.malformed:
        findings.append(finding("warning", "log-unreadable", "", f"{log.malformed} malformed PerfLog lines"))
    if serving.malformed_lines:
        first = f": {lines.first_problem}" if lines.first_problem else ""
        actual = f"{serving.malformed_lines} malformed lines in {REQUESTS_FILE} and {ANSWERS_FILE}{first}"
        findings.append(finding("error", "request-records", "a record on every line", actual))
    findings += agreement_findings(round_dir, job, nodes, {str(node_dir): log.times}, hosts)
    findings += contention_findings(nodes, {0: log.finished})
    headline = next((one for one in measured if one.stage.stage == serving.headline), None)
    findings += [finding("warning", "telemetry-note", "", note) for note in (headline.notes if headline else ())]
    figures = _figures(job, serving, log, headline.used if headline else {}, hosts)
    return round_of(
        job,
        state,
        nodes,
        findings,
        {"started": log.started},
        task="serve",
        figures={name: figures[name] for name in figures_of("serve")},
        telemetry=telemetry_series(hosts, span),
        curves=curves_of([stage.load for stage in ended], requests),
        num_samples=headline.num_tokens if headline else 0,
        num_devices=num_devices,
        serving=serving,
    )


def _highest_rate(stages: Sequence[schema.ServingStage], *, has_slo: bool) -> tuple[float | None, str]:
    """Return the highest rate of an open load that held the SLO, with a note, or the reason why there is none."""
    if not has_slo:
        return None, _NO_LIMITS
    tried = {stage.rate: stage.holds_slo is True for stage in stages if stage.rate and stage.scenario is None}
    if not tried:
        return None, "no load at a given rate was measured"
    highest = max((rate for rate, holds in tried.items() if holds), default=None)
    if highest is None:
        return None, f"no rate held the SLO; the lowest was {min(tried):.4g} requests/s"
    if highest == max(tried):
        return highest, "a lower bound: no higher rate was measured"
    missed = [rate for rate, holds in tried.items() if not holds and rate < highest]
    return highest, f"at {max(missed):.4g} requests/s the SLO was missed" if missed else ""


def _figures(job: JobSpec, serving: schema.ServingRound, log: ServeLog, used: Figures, hosts: HostSamples) -> Figures:
    stage = serving.headline_stage
    absent = log.finished.message if log.finished and log.finished.message else serving.headline_why
    used = used or consumption_figures({}, 0, job.device_type, absent)[0]
    num_requests = sum(planned.num_requests for planned in serving.planned_stages)
    failed = sum(planned.num_failed for planned in serving.planned_stages)
    e2e_s = (log.last_ms - log.begin_ms) / 1000 if log.begin_ms is not None else None
    if job.device_type == "cpu":
        unknown = "the memory of the server's processes was not sampled"
        memory_mib = log.finished.peak_memory_mib if log.finished is not None else None
        memory = value(memory_mib, unknown if log.finished is not None else "the rank wrote no event FINISHED")
    else:
        memory_mib, note = device_memory(hosts, job.device_type)
        memory = Figure(value=memory_mib, reason="telemetry has no device memory" if memory_mib is None else note)
    return {
        **stage_figures(serving, absent, "num_compared"),
        F.GOODPUT: value(stage.goodput if stage else None, _NO_LIMITS if stage else absent),
        F.SLO_SHARE: value(stage.slo_share if stage else None, _NO_LIMITS if stage else absent),
        F.SLO_RATE: Figure(value=serving.highest_rate, reason=serving.highest_rate_note or None),
        F.FAILED_SHARE: value(failed / num_requests if num_requests else None, absent),
        F.SERVER_START_TIME: value(serving.start_s, "the endpoint was running" if serving.endpoint else absent),
        F.E2E_TIME: value(e2e_s, "no rank wrote an event"),
        F.PEAK_DEVICE_MEMORY: memory,
        **used,
    }


_BYTES: Final = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Precision -> bytes of a weight, and of a number of the KV cache in an engine that does not quantise it."""
_SHAPES: Final = ("body_parameters", "head_parameters", "step_parameters", "attention_width", "cache_width")
"""Of the model, as the step CREATE reports them."""


def has_shapes(details: Mapping[str, Scalar]) -> bool:
    """Return whether a run reported the model's shapes."""
    return all(isinstance(details.get(name), int) for name in _SHAPES)


def generation_stage(
    stage: schema.ServingStage,
    requests: Requests,
    details: Mapping[str, Scalar],
    precision: str,
    peak_tflops: float | None,
    bandwidth_gb_s: float | None,
) -> schema.ServingStage:
    """Return ``stage`` with the figures of generation.

    ``requests`` are the stage's, in batches; ``details`` has the shapes of the model. The dense peak in
    ``precision`` and the bandwidth of the memories are those of all devices together.
    """
    if stage.window_s is None or stage.concurrency is None:
        return stage
    begin_s, end_s = stage.window_s
    known = counted(requests)
    known = known.where((known.due_s >= begin_s) & (known.due_s < end_s) & np.isfinite(known.tokens_in))
    if not len(known):
        return stage
    batch = stage.concurrency
    prompt, answer = float(known.tokens_in.mean()), float(known.tokens.mean())
    prefill_s = float((known.first_s - known.due_s).mean())
    decode_s = float((known.end_s - known.first_s).mean())
    figures: dict[str, float | None] = {
        "prefill_token_rate": batch * prompt / prefill_s if prefill_s > 0 else None,
        "decode_token_rate": batch * (answer - 1) / decode_s if decode_s > 0 else None,
    }
    if has_shapes(details):
        body, head, step, attention, cache = (int(details[name] or 0) for name in _SHAPES)
        bytes_per_number, context, steps = _BYTES[precision], prompt + answer / 2, answer - 1
        decodes = decode_s > 0 and steps > 0
        figures["kv_cache_mib"] = bytes_per_number * cache * (batch * (prompt + answer)) / 2**20
        if peak_tflops and prefill_s > 0:
            flops = batch * (2 * (body * prompt + head) + 4 * attention * prompt**2)
            figures["prefill_mfu"] = flops / prefill_s / (peak_tflops * 1e12)
        if peak_tflops and decodes:
            flops = batch * steps * (2 * (body + head) + 4 * attention * context)
            figures["decode_mfu"] = flops / decode_s / (peak_tflops * 1e12)
        if bandwidth_gb_s and decodes:
            num_bytes = steps * (bytes_per_number * step + bytes_per_number * cache * (batch * context))
            figures["decode_mbu"] = num_bytes / decode_s / (bandwidth_gb_s * 1e9)
    return stage.model_copy(update=figures)


def generation_round(
    job: JobSpec, infer: InferJob, log: InferLog, node_dir: Path, hosts: HostSamples, no_telemetry: str
) -> tuple[schema.ServingRound, Figures, dict[str, tuple[schema.Point, ...]]]:
    """Return the stages, figures and curves of text; figures that were not measured are null with a reason."""
    settings = generation_load(infer.settings)
    requests, lines = read_requests(node_dir / REQUESTS_FILE)
    create, chip, precision = log.stage(InferStep.CREATE), job.chip, infer.settings.precision
    details: Mapping[str, Scalar] = create.details if create is not None else {}
    peaks = (getattr(chip.peaks, precision, None), chip.memory_bandwidth_gb_s) if chip is not None else (None, None)
    peak, bandwidth = (of_one * job.key.nproc if of_one else None for of_one in peaks)
    measured = measured_stages(job, log.loads, requests, settings, job.key.nproc, hosts, no_telemetry)
    stages = [generation_stage(one.stage, own, details, precision, peak, bandwidth) for one, own in measured]
    serving = serving_round(
        settings,
        (requests, lines.malformed),
        node_dir,
        stages,
        scenarios=tuple(log.token_scenarios),
        has_slo=False,
        min_agreement=infer.min_agreement,
        num_devices=job.key.nproc,
        server=None,
        engine=infer.settings.compiler,
        endpoint=None,
        served_model=None,
        has_tokenizer=True,
    )
    stage = serving.headline_stage
    absent = (log.finished.message if log.finished is not None else None) or serving.headline_why
    unknown = absent if stage is None else "the step create did not report the model's shapes"
    no_peak = "the chip's peak at this precision is unknown" if has_shapes(details) else unknown
    no_bandwidth = "the chip's memory bandwidth is unknown" if has_shapes(details) else unknown
    reasons = {
        F.KV_CACHE: unknown, F.PREFILL_MFU: no_peak, F.DECODE_MFU: no_peak, F.DECODE_MBU: no_bandwidth,
    }  # fmt: skip
    figures = stage_figures(serving, absent, "generate_compared") | {
        name: value(getattr(stage, field) if stage else None, reasons.get(name, absent))
        for name, field in _GENERATION.items()
    }
    return serving, figures, curves_of([ended.load for ended in log.loads], requests)
