"""Compute the result of a serving round, and the stages and figures of a load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.results.figures import FigureName as F
from accelmark.results.figures import figures_of
from accelmark.results.read.rank_log import EndedStage, ServeLog, read_log
from accelmark.results.read.requests import LinesReport, Requests, read_comparisons, read_requests
from accelmark.results.read.round_dir import LedgerState, NodeDir
from accelmark.results.rounds.consistency import agreement_findings
from accelmark.results.rounds.consumption import HostSamples, consumption_figures, device_memory
from accelmark.results.rounds.curves import telemetry_series
from accelmark.results.rounds.hosts import (
    contention_findings,
    environment_of,
    job_state,
    read_telemetry,
    round_marks,
    round_of,
)
from accelmark.results.rounds.load import (
    StageRequests,
    compared_answers,
    has_limits,
    load_curves,
    measured_stage,
    prompt_use,
    timeline_of,
)
from accelmark.results.schema import (
    Figure,
    Figures,
    Finding,
    Point,
    RoundResult,
    ServingRound,
    ServingStage,
    finding,
    value,
)
from accelmark.spec.job import JobSpec, ServeJob
from accelmark.spec.log.serving import ANSWERS_FILE, REQUESTS_FILE, ServeEndReason, TokenScenarioResult
from accelmark.spec.settings.serving import ServeSettings, TokenScenario

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


class Consumption(NamedTuple):
    """Telemetry of the hosts, and why there is none."""

    hosts: HostSamples
    reason: str


def consumed(
    job: JobSpec, stage: ServingStage, load: EndedStage, consumption: Consumption
) -> tuple[Figures, list[str], int]:
    """Return the figures from telemetry over the stage's window, warnings about them, and the tokens in it."""
    if stage.window_s is None:
        figures, notes = consumption_figures({}, 0, job.device_type, stage.reasons[0])
        return figures, notes, 0
    begin_s, end_s = (load.load.begin_mono_s + time for time in stage.window_s)
    tokens = round((stage.output_token_rate or 0.0) * (end_s - begin_s))
    hosts = {host: (samples, ((begin_s, end_s),)) for host, (samples, _) in consumption.hosts.items()}
    figures, notes = consumption_figures(hosts, tokens, job.device_type, consumption.reason)
    return figures, notes, tokens


def stage_of(
    job: JobSpec,
    settings: ServeSettings,
    requests: Requests,
    ended: EndedStage,
    num_devices: int,
    consumption: Consumption,
) -> ServingStage:
    """Return the figures of one stage, with the energy in its window."""
    chosen = requests.where(requests.stage == ended.load.stage)
    ended_s = ended.mono_s - ended.load.begin_mono_s
    stage = measured_stage(chosen, ended.load, settings, num_devices, ended_s)
    used = consumed(job, stage, ended, consumption)[0]
    return stage.model_copy(
        update={
            "mean_power_w": used[F.MEAN_POWER].value,
            "joules_per_token": used[F.ENERGY_PER_UNIT].value,
            "tokens_per_joule": used[F.UNITS_PER_JOULE].value,
        }
    )


def headline_of(stages: Sequence[ServingStage], *, has_slo: bool) -> tuple[int | None, str]:
    """Return the stage with the round's figures, and how it was chosen."""
    measured = [stage for stage in stages if stage.output_token_rate is not None and stage.scenario is None]
    if not measured:
        return None, "no stage has a rate of output tokens"
    if not has_slo:
        best = max(measured, key=lambda stage: stage.output_token_rate or 0.0)
        return best.stage, "the stage with the highest rate of output tokens; there is no SLO"
    holding = [stage for stage in measured if stage.holds_slo]
    if holding:
        best = max(holding, key=lambda stage: stage.output_token_rate or 0.0)
        return best.stage, "the stage with the highest rate of output tokens that holds the SLO"
    best = max(measured, key=lambda stage: stage.slo_share or 0.0)
    return best.stage, "no stage holds the SLO: the stage in which the largest share of requests does"


def serving_round(
    settings: ServeSettings,
    recorded: tuple[Requests, int],
    node_dir: Path | None,
    stages: Sequence[ServingStage],
    scenarios: Sequence[TokenScenarioResult],
    *,
    has_slo: bool,
    min_agreement: float,
    **own: Any,
) -> ServingRound:
    """Return the stages of a load with the answers, prompts and scores; ``recorded`` has the malformed requests."""
    requests, malformed = recorded
    compared = read_comparisons(node_dir)
    headline, why = headline_of(stages, has_slo=has_slo)
    return ServingRound(
        api=settings.api,
        output_length="pinned" if settings.is_pinned else "natural",
        slo=settings.slo,
        stages=tuple(stages),
        headline=headline,
        headline_why=why,
        answers=compared_answers(compared.answers, requests, settings.num_compared, min_agreement),
        prompts=prompt_use(requests),
        scores=tuple(compared.scores),
        scenarios=tuple(scenarios),
        timeline=() if headline is None else timeline_of(requests.where(requests.stage == headline)),
        malformed_lines=malformed + compared.malformed,
        **own,
    )


def stage_figures(stage: ServingStage | None, absent: str) -> Figures:
    """Return rates and percentiles of the headline stage; ``absent`` is the reason where there is none."""
    return {
        **{name: value(getattr(stage, field) if stage else None, absent) for name, field in _RATES.items()},
        **{name: _percentile(stage, *of, absent) for name, of in _PERCENTILES.items()},
    }


def scenario_figures(scenarios: Sequence[TokenScenarioResult]) -> Figures:
    """Return the figures of LoadGen's scenarios with token latencies."""
    results = {result.scenario: result for result in scenarios}
    figures: Figures = {}
    for name, scenario in _SCENARIOS.items():
        result = results.get(scenario)
        absent = (result.reason if result else "the scenario was not requested") or "LoadGen reported none"
        figures[name] = value(result.tokens_per_second if result else None, absent)
    return figures


def _percentile(stage: ServingStage | None, latency: str, name: str, absent: str) -> Figure:
    distribution = stage.latencies.get(latency) if stage is not None else None
    quantile = distribution.quantiles.get(name) if distribution is not None else None
    return value(quantile.value, quantile.reason or absent) if quantile is not None else value(None, absent)


def load_span(ended: Sequence[EndedStage]) -> tuple[float, float] | None:
    """Return begin and end of all stages in seconds of their host's monotonic clock; None without a stage."""
    if not ended:
        return None
    last = ended[-1].load
    return ended[0].load.begin_mono_s, last.begin_mono_s + last.duration_s


def curves_of(ended: Sequence[EndedStage], requests: Requests) -> dict[str, tuple[Point, ...]]:
    """Return the curves of all stages over time."""
    first_s = ended[0].load.begin_mono_s if ended else 0.0
    return load_curves(
        [
            StageRequests(
                stage.load.stage, stage.load.begin_mono_s - first_s, requests.where(requests.stage == stage.load.stage)
            )
            for stage in ended
        ]
    )


_ENDS: Final[dict[ServeEndReason, str]] = {
    "server_missing": "the server is not installed",
    "never_healthy": "the server did not become healthy within start_timeout_s",
    "server_died": "the server ended while it was measured",
    "unreachable": "the endpoint cannot be reached",
    "bad_request": "the settings contradict each other",
    "cancelled": "the run was cancelled",
}
_NO_LIMITS: Final = "the SLO has no limits"
_ENDPOINT: Final = "the endpoint's machine records no telemetry"


class _Records(NamedTuple):
    """What the processes of a round wrote."""

    log: ServeLog
    requests: Requests
    lines: LinesReport
    node: NodeDir | None


def serve_round(
    round_dir: Path, job: JobSpec, serve: ServeJob, nodes: list[NodeDir], ledger: LedgerState | None
) -> RoundResult:
    """Compute the result of a serving round, even if it failed, was lost or is incomplete.

    ``ledger`` is the last state that the coordinator recorded. Raises RunError if a file of the rank cannot be read.
    """
    records = _read(nodes)
    log, requests = records.log, records.requests
    ended = [stage for stage in log.stages if stage.load.stage >= 0]
    state, reason = job_state(job, nodes, _error(log, ended), log.begin_ms is not None, ledger)
    findings: list[Finding] = []
    consumption = _telemetry(serve, records, ended, nodes, findings)
    num_devices = log.started.num_devices if log.started else job.key.nproc
    stages = [stage_of(job, serve.settings, requests, stage, num_devices, consumption) for stage in ended]
    serving = _serving(serve, records, stages, num_devices)
    findings += _findings(serving, log, records.lines)
    times = {str(records.node.path): log.times} if records.node is not None else {}
    findings += agreement_findings(round_dir, job, nodes, times, consumption.hosts)
    findings += contention_findings(nodes, {0: log.finished})
    figures, num_tokens = _figures(job, serving, log, ended, consumption, findings)
    return round_of(
        job,
        (state, reason),
        nodes,
        findings,
        task="serve",
        marks=round_marks(job, state, findings, synthetic=False, partial_evaluation=False),
        figures={name: figures[name] for name in figures_of("serve")},
        curves=curves_of(ended, requests),
        telemetry=telemetry_series(consumption.hosts, load_span(ended)),
        num_samples=num_tokens,
        num_devices=num_devices,
        serving=serving,
        environment=environment_of(nodes, started=log.started),
    )


def _read(nodes: Sequence[NodeDir]) -> _Records:
    """Read the files of the node whose rank loaded the server."""
    first = next(((node, logs[0][1]) for node in nodes if (logs := node.rank_logs())), None)
    node, log = (first[0], read_log(first[1], ServeLog)) if first else (None, ServeLog())
    requests, lines = read_requests(node.path / REQUESTS_FILE if node else Path(REQUESTS_FILE))
    return _Records(log, requests, lines, node)


def _error(log: ServeLog, ended: Sequence[EndedStage]) -> str | None:
    """Return why the rank did not complete the load, None where it did."""
    finished = log.finished
    if finished is None:
        return "the rank wrote no event FINISHED" if log.begin_ms is not None else None
    if finished.state != "completed":
        return finished.message or _ENDS.get(finished.end_reason, finished.end_reason)
    return None if ended else "no stage of the load was measured"


def _telemetry(
    serve: ServeJob, records: _Records, ended: Sequence[EndedStage], nodes: list[NodeDir], findings: list[Finding]
) -> Consumption:
    if serve.settings.endpoint is not None:
        return Consumption({}, _ENDPOINT)
    spans = {}
    if records.node is not None and (span := load_span(ended)) is not None:
        spans[str(records.node.path)] = (span,)
    hosts, reason = read_telemetry(nodes, spans, findings)
    return Consumption(hosts, "no stage of the load was measured" if not ended else reason)


def _serving(serve: ServeJob, records: _Records, stages: Sequence[ServingStage], num_devices: int) -> ServingRound:
    settings, started = serve.settings, records.log.started
    rate, note = _highest_rate(stages, has_slo=has_limits(settings.slo))
    options = settings.server_options
    return serving_round(
        settings,
        (records.requests, records.lines.malformed),
        records.node.path if records.node else None,
        stages,
        records.log.scenarios,
        has_slo=has_limits(settings.slo),
        min_agreement=serve.min_agreement,
        num_devices=num_devices,
        server=serve.server.name if serve.server else None,
        endpoint=settings.endpoint,
        served_model=started.served_model if started else settings.served_model,
        command=started.command if started else (),
        start_s=started.start_s if started else None,
        start=started.start if started else None,
        load=records.log.finished.load if records.log.finished else None,
        facts={fact: options.get(option) for fact, option in serve.server.facts.items()} if serve.server else {},
        server_cores=started.server_cores if started else (),
        client_cores=started.client_cores if started else (),
        has_tokenizer=started is not None and started.has_tokenizer,
        highest_rate=rate,
        highest_rate_note=note,
    )


def _highest_rate(stages: Sequence[ServingStage], *, has_slo: bool) -> tuple[float | None, str]:
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


def _figures(
    job: JobSpec,
    serving: ServingRound,
    log: ServeLog,
    ended: Sequence[EndedStage],
    consumption: Consumption,
    findings: list[Finding],
) -> tuple[Figures, int]:
    """Return the figures of the headline stage, and its output tokens."""
    stage, answers = serving.headline_stage, serving.answers
    load = next((candidate for candidate in ended if stage is not None and candidate.load.stage == stage.stage), None)
    absent = log.finished.message if log.finished and log.finished.message else serving.headline_why
    planned = serving.planned_stages
    num_requests = sum(planned_stage.num_requests for planned_stage in planned)
    failed = sum(planned_stage.num_failed for planned_stage in planned)
    e2e_s = (log.last_ms - log.begin_ms) / 1000 if log.begin_ms is not None else None
    if stage is not None and load is not None:
        used, notes, tokens = consumed(job, stage, load, consumption)
        findings += [finding("warning", "telemetry-note", "", note) for note in notes]
    else:
        used, _ = consumption_figures({}, 0, job.device_type, absent)
        tokens = 0
    not_compared = "num_compared is 0" if not answers.num_promised else "no answer was compared"
    figures: Figures = {
        **stage_figures(stage, absent),
        **scenario_figures(serving.scenarios),
        F.GOODPUT: value(stage.goodput if stage else None, _NO_LIMITS if stage else absent),
        F.SLO_SHARE: value(stage.slo_share if stage else None, _NO_LIMITS if stage else absent),
        F.SLO_RATE: value(serving.highest_rate, serving.highest_rate_note),
        F.FAILED_SHARE: value(failed / num_requests if num_requests else None, absent),
        F.ANSWER_AGREEMENT: value(answers.agreement, not_compared),
        F.SERVER_START_TIME: value(serving.start_s, "the endpoint was running" if serving.endpoint else absent),
        F.E2E_TIME: value(e2e_s, "no rank wrote an event"),
        F.PEAK_DEVICE_MEMORY: _peak_memory(consumption.hosts, job.device_type, log),
        **used,
    }  # fmt: skip
    if serving.highest_rate is not None and serving.highest_rate_note:
        figures[F.SLO_RATE] = figures[F.SLO_RATE].model_copy(update={"reason": serving.highest_rate_note})
    return figures, tokens


def _peak_memory(hosts: HostSamples, device_type: str, log: ServeLog) -> Figure:
    """Return the largest memory in use on a device, or of the server's processes where it computes on the CPU."""
    if device_type == "cpu":
        used_mib = log.finished.peak_memory_mib if log.finished is not None else None
        unknown = "the memory of the server's processes was not sampled"
        return value(used_mib, unknown if log.finished is not None else "the rank wrote no event FINISHED")
    used, note = device_memory(hosts, device_type)
    return Figure(value=used, reason=note if used is not None else "telemetry has no device memory")


def _findings(serving: ServingRound, log: ServeLog, lines: LinesReport) -> Iterable[Finding]:
    for warning in dict.fromkeys(log.warnings):
        yield finding("warning", "rank-warning", "", warning)
    if log.malformed:
        yield finding("warning", "log-unreadable", "", f"{log.malformed} malformed PerfLog lines")
    if serving.malformed_lines:
        first = f": {lines.first_problems[0]}" if lines.first_problems else ""
        actual = f"{serving.malformed_lines} malformed lines in {REQUESTS_FILE} and {ANSWERS_FILE}{first}"
        yield finding("error", "request-records", "a record on every line", actual)
