"""Compute the result of a serving round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from accelmark.results.figure_names import SERVE_FIGURES
from accelmark.results.figure_names import FigureName as F
from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.curves import telemetry_series
from accelmark.results.figures.served_answers import compared_answers, prompt_use
from accelmark.results.figures.serving import has_limits, timeline_of
from accelmark.results.figures.training import Figures, value
from accelmark.results.read.rank_log import EndedStage
from accelmark.results.read.requests import LinesReport, Requests, read_answers, read_requests, read_scores
from accelmark.results.read.round_dir import LedgerState, NodeDir
from accelmark.results.read.serving_log import ServeLog, read_serve_log
from accelmark.results.rounds.consistency import agreement_findings
from accelmark.results.rounds.hosts import contention_findings, host_infos, job_state, read_telemetry, round_marks
from accelmark.results.rounds.load import (
    Consumption,
    consumed,
    curves_of,
    headline_of,
    load_span,
    scenario_figures,
    stage_figures,
    stage_of,
)
from accelmark.results.schema import Environment, Figure, Finding, RoundResult, finding
from accelmark.results.serving_schema import ServingRound, ServingStage
from accelmark.spec.job import JobSpec, ServeJob
from accelmark.spec.log.serving import ANSWERS_FILE, REQUESTS_FILE, SCORES_FILE, ServeEndReason

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
    """Compute the result of a serving round, also of one that failed, was lost or is incomplete.

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
    serving = _serving(serve, records, ended, stages, num_devices)
    findings += _findings(serving, log, records.lines)
    times = {str(records.node.path): log.times} if records.node is not None else {}
    findings += agreement_findings(round_dir, job, nodes, times, consumption.hosts)
    findings += contention_findings(nodes, {0: log.finished})
    figures, num_tokens = _figures(job, serving, log, ended, consumption, findings)
    return RoundResult(
        key=job.key,
        task="serve",
        round=job.round,
        case_version=job.case_version,
        unit=serve.unit,
        state=state,
        reason=reason,
        converged=None,
        marks=round_marks(job, state, findings, synthetic=False, partial_evaluation=False),
        vendor=job.vendor,
        chip=job.chip,
        precision=serve.settings.precision,
        started_at=min((node.exit.started_at for node in nodes if node.exit), default=""),
        figures={name: figures[name] for name in SERVE_FIGURES},
        curves=curves_of(ended, requests),
        telemetry=telemetry_series(consumption.hosts, load_span(ended)),
        num_samples=num_tokens,
        num_devices=num_devices,
        min_rounds=serve.min_repeats,
        serving=serving,
        nodes=tuple(node.exit for node in nodes if node.exit),
        environment=Environment(hosts=host_infos(nodes), started=log.started.model_dump() if log.started else {}),
        settings=job.provenance,
        findings=tuple(findings),
    )


def _read(nodes: Sequence[NodeDir]) -> _Records:
    """Read the files of the node whose rank loaded the server."""
    found = next(((node, logs[0][1]) for node in nodes if (logs := node.rank_logs())), None)
    node, log = (found[0], read_serve_log(found[1])) if found else (None, ServeLog())
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


def _serving(
    serve: ServeJob, records: _Records, ended: Sequence[EndedStage], stages: Sequence[ServingStage], num_devices: int
) -> ServingRound:
    settings, started, requests = serve.settings, records.log.started, records.requests
    answers, answer_lines = read_answers(records.node.path / ANSWERS_FILE if records.node else Path(ANSWERS_FILE))
    scores, score_lines = read_scores(records.node.path / SCORES_FILE if records.node else Path(SCORES_FILE))
    headline, why = headline_of(stages, has_slo=has_limits(settings.slo))
    rate, note = _highest_rate(stages, has_slo=has_limits(settings.slo))
    return ServingRound(
        server=serve.server.name if serve.server else None,
        endpoint=settings.endpoint,
        served_model=started.served_model if started else settings.served_model,
        api=settings.api,
        command=started.command if started else (),
        start_s=started.start_s if started else None,
        facts={fact: settings.server_options.get(option) for fact, option in serve.server.facts.items()}
        if serve.server
        else {},
        num_devices=num_devices,
        server_cores=started.server_cores if started else (),
        client_cores=started.client_cores if started else (),
        has_tokenizer=started is not None and started.has_tokenizer,
        output_length="pinned" if settings.is_pinned else "natural",
        slo=settings.slo,
        stages=tuple(stages),
        headline=headline,
        headline_why=why,
        highest_rate=rate,
        highest_rate_note=note,
        answers=compared_answers(answers, requests, settings.num_compared, serve.min_agreement),
        prompts=prompt_use(requests),
        scores=tuple(scores),
        scenarios=tuple(records.log.scenarios),
        timeline=() if headline is None else timeline_of(requests.where(requests.stage == headline)),
        malformed_lines=records.lines.malformed + answer_lines.malformed + score_lines.malformed,
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
    load = next((each for each in ended if stage is not None and each.load.stage == stage.stage), None)
    absent = log.finished.message if log.finished and log.finished.message else serving.headline_why
    planned = serving.planned_stages
    num_requests = sum(found.num_requests for found in planned)
    failed = sum(found.num_failed for found in planned)
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
    own = [samples for samples, _ in hosts.values() if not samples.measures_cpus(device_type)]
    columns = [device.get("memory_used_mib", ()) for samples in own for device in samples.devices.values()]
    used = max((used for column in columns for used in column if used == used), default=None)
    return value(used, "telemetry has no device memory")


def _findings(serving: ServingRound, log: ServeLog, lines: LinesReport) -> Iterable[Finding]:
    for warning in dict.fromkeys(log.warnings):
        yield finding("warning", "rank-warning", "", warning)
    if log.malformed:
        yield finding("warning", "log-readable", "", f"{log.malformed} malformed PerfLog lines")
    if serving.malformed_lines:
        first = f": {lines.first_problems[0]}" if lines.first_problems else ""
        actual = f"{serving.malformed_lines} malformed lines in {REQUESTS_FILE} and {ANSWERS_FILE}{first}"
        yield finding("error", "request-records", "a record on every line", actual)
