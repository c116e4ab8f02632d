"""Run the stages of a load and LoadGen's scenarios, with events, progress, records and a sample of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

from accelmark.results.rounds.load import Requests, RequestTable
from accelmark.serving.answers import AnswerSample
from accelmark.serving.load import EXPECTED_STEPS, FIRST_SHARE, LoadPlan, ServedModel, search_rate
from accelmark.serving.loadgen import MIN_TOKENS, MLPERF_MIN_DURATION_S, LoadGenLog, library, read_log
from accelmark.serving.request import Load, LoadGenRun, LoadGenSettings, PlannedRequest, Record, Watch
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import (
    SCENARIO_PHASES,
    LoadPhase,
    LoadProgress,
    LoadStage,
    RequestRecord,
    TokenScenarioResult,
)
from accelmark.spec.settings.serving import ServeSettings, TokenScenario

_OVERDUE: Final = 0.99
"""Share of a load that takes longer than planned."""


class LoadReporter:
    """Reports the completed share and the remaining time of a load, whose parts have planned durations.

    Emits ``HEARTBEAT`` at the beginning of each part, and at most once a second within it.
    """

    def __init__(self, emit: Callable[[Event, Any], None]) -> None:
        self.num_requests = 0
        """Requests or queries that ended."""
        self._emit = emit
        self._phase: LoadPhase = "warming up"
        self._part_s: float | None = None
        self._later_s = 0.0
        self._share = 0.0
        self._first_s: float | None = None
        """When the first part with a planned duration began; on the clock of ``time.monotonic``, as those below."""
        self._begun_s = self._reported_s = 0.0

    def begin(self, phase: LoadPhase, part_s: float | None = None, later_s: float = 0.0) -> None:
        """Begin a part of about ``part_s``, after which about ``later_s`` of other parts are planned, in seconds.

        Without ``part_s`` it has no share and no remaining time. The share never decreases, also where more is planned.
        """
        self._phase, self._part_s, self._later_s = phase, part_s, later_s
        self._begun_s = time.monotonic()
        if part_s is not None and self._first_s is None:
            self._first_s = self._begun_s
        self._report(self._begun_s)

    def add(self, num_requests: int) -> None:
        """Count requests that ended."""
        self.num_requests += num_requests
        self.report()

    def report(self) -> None:
        """Report, unless that was done within the last second."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= 1.0:
            self._report(now_s)

    def _report(self, now_s: float) -> None:
        self._reported_s = now_s
        share = eta_s = None
        if self._part_s is not None and self._first_s is not None:
            eta_s = max(0.0, self._begun_s + self._part_s - now_s) + self._later_s
            passed_s = now_s - self._first_s
            share = self._share = max(self._share, min(passed_s / max(passed_s + eta_s, 1e-9), _OVERDUE))
        progress = LoadProgress(phase=self._phase, num_requests=self.num_requests, share=share, eta_s=eta_s)
        self._emit(Event.HEARTBEAT, progress)


class StageClient(Protocol):
    """Sends the requests of a stage."""

    def run_stage(self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Watch) -> LoadStage:
        """Run one stage; call ``record`` with each request that ended, and ``watch`` at times."""


@dataclass
class Stages:
    """The stages of a run so far."""

    client: StageClient
    model: ServedModel
    emit: Callable[[Event, Any], None]
    stream: IO[str]
    """For the records of requests."""
    sample: AnswerSample
    check_server: Watch

    def __post_init__(self) -> None:
        self.progress = LoadReporter(self.emit)
        self.tokenizer_dir = self.model.directory if self.model.tokens is not None else None
        self._ended = RequestTable()

    def run(self, load: Load, requests: Iterable[PlannedRequest]) -> tuple[LoadStage, Requests]:
        """Run one stage; return it with its requests. Raises RunError: the server or the client ended."""
        self._ended = RequestTable()
        if load.stage < 0:
            self.progress.begin("warming up")
        else:
            phase = "under load" if load.loadgen is None else SCENARIO_PHASES[load.loadgen.scenario]
            self.progress.begin(phase, load.until_s, load.later_s)
        begun = {"stage": load.stage, "arrival": load.arrival, "concurrency": load.concurrency, "rate": load.rate}
        self.emit(Event.LOAD_BEGIN, begun)
        done = self.client.run_stage(self._watched(requests), load, self._record, self._watch)
        self.stream.flush()
        self.emit(Event.LOAD_END, done)
        return done, self._ended.requests()

    def _watched(self, requests: Iterable[PlannedRequest]) -> Iterator[PlannedRequest]:
        """Yield the requests, whose prompts take time to draw: up to 0.1 s for one of 32,768 tokens."""
        for request in requests:
            self._watch()
            yield request

    def _record(self, request: PlannedRequest, record: RequestRecord, text: str) -> None:
        """Write the record of a request that ended, with the tokens of its answer."""
        if self.model.tokens is not None and record.status == "ok" and record.output_tokens is None:
            record = record.model_copy(update={"output_tokens": len(self.model.tokens(text))})
        self.stream.write(record.model_dump_json() + "\n")
        self._ended.add(record)
        self.progress.num_requests += 1
        if record.stage >= 0 and record.status == "ok":
            self.sample.add(request, record, text)

    def _watch(self) -> None:
        self.check_server()
        self.progress.report()


_HEADROOM: Final = 1.2
"""LoadGen advises to expect more than the measured rate."""
_LONGEST: Final = 10.0
"""Longest run of the search, in the least durations of a run: lower rates are not tried."""
_OFFLINE_WAIT: Final = 4.0
"""Longest wait for an answer of the Offline scenario, in which all queries wait, in durations of a run."""


class _Run(NamedTuple):
    log: LoadGenLog
    stage: LoadStage
    num_failed: int
    log_dir: Path

    @property
    def holds(self) -> bool:
        return self.log.bound_met and not self.num_failed


@dataclass
class TokenScenarios:
    """Runs the scenarios of the settings, with the stages of a load."""

    settings: ServeSettings
    plan: LoadPlan
    stages: Stages
    node_dir: Path
    emit: Callable[[Event, Any], None]

    def run(self) -> None:
        """Run them in the order of the settings. Raises AccelmarkError: the server, the client or LoadGen ended."""
        if self.settings.scenarios:
            library()  # its absence is reported before the first stage
        for name in self.settings.scenarios:
            self.emit(Event.TOKEN_SCENARIO, self._server() if name == "server" else self._offline())

    def _server(self) -> TokenScenarioResult:
        runs: dict[float, _Run] = {}
        slo = self.settings.slo

        later_s = self.plan.begin(EXPECTED_STEPS * self.settings.scenario_duration_s)

        def holds(rate: float, steps_left: int) -> bool:
            left_s = later_s + steps_left * self.settings.scenario_duration_s
            expected = self._expected(rate, ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, share=slo.share)
            runs[rate] = self._run("server", expected, f"try{len(runs) + 1:02}_qps_{rate:.3f}", left_s)
            return runs[rate].holds

        least = self.settings.scenario_queries / (_LONGEST * self.settings.scenario_duration_s)
        best = search_rate(holds, max(FIRST_SHARE * self.plan.answered_rate, least), least)
        shown = min(runs) if best is None else best
        log = runs[shown].log
        result = self._result("server", runs[shown], log.number("result_completed_tokens_per_second"), best)
        update: dict[str, Any] = {
            "ttft_limit_ms": slo.ttft_ms,
            "tpot_limit_ms": slo.tpot_ms,
            "ttft_ms": log.percentiles_ms("result_first_token_{}_percentile_latency_ns"),
            "tpot_ms": log.percentiles_ms("result_time_per_output_token_{}_percentile_ns"),
            "tried": tuple((rate, run.holds) for rate, run in runs.items()),
        }
        if best is None:
            update |= {"tokens_per_second": None, "reason": "no tried rate held the limits"}
        return result.model_copy(update=update)

    def _offline(self) -> TokenScenarioResult:
        rate = max(self.plan.answered_rate, 1e-3)
        later_s = self.plan.begin(self.settings.scenario_duration_s)
        for number in range(3):  # again where the estimate was too low for the minimum duration
            run = self._run("offline", self._expected(rate * _HEADROOM), f"try{number + 1:02}", later_s)
            if run.log.long_enough or run.num_failed:
                break
            rate = run.log.number("result_samples_per_second") or rate * _HEADROOM
        tokens_per_s, queries_per_s = map(run.log.number, ("result_tokens_per_second", "result_samples_per_second"))
        return self._result("offline", run, tokens_per_s, queries_per_s)

    def _expected(self, rate: float, **limits: Any) -> LoadGenSettings:
        least = LoadGenSettings(self.settings.scenario_duration_s, self.settings.scenario_queries, rate)
        return replace(least, token_latencies=True, **limits)

    def _run(self, name: TokenScenario, expected: LoadGenSettings, folder: str, later_s: float) -> _Run:
        settings, rate = self.settings, expected.queries_per_s
        waits_s = _OFFLINE_WAIT * expected.min_duration_s if name == "offline" else 0.0
        num_queries = max(expected.min_queries, round(expected.min_duration_s * rate))
        log_dir = self.node_dir / "loadgen" / name / folder
        load = Load(
            stage=self.plan.next_stage(),
            until_s=expected.min_duration_s,
            timeout_s=settings.request_timeout_s + waits_s,
            arrival="poisson" if name == "server" else "at_once",
            rate=rate if name == "server" else None,
            later_s=later_s,
            loadgen=LoadGenRun(name, expected, log_dir, self.stages.tokenizer_dir),
            num_drawn=round(num_queries * _HEADROOM),
        )
        stage, requests = self.stages.run(load, self.plan.fresh_requests())
        num_failed = int((~(requests.is_ok & (requests.tokens >= MIN_TOKENS))).sum())  # an unknown number is NaN
        return _Run(read_log(log_dir), stage, num_failed, log_dir)

    def _result(
        self, name: TokenScenario, run: _Run, tokens_per_s: float | None, queries_per_s: float | None
    ) -> TokenScenarioResult:
        failed = f"{run.num_failed} of {run.stage.num_requests} queries failed or have fewer than two tokens"
        reasons = [reason for reason in (failed if run.num_failed else None, run.log.reason) if reason]
        return TokenScenarioResult(
            scenario=name,
            stage=run.stage.stage,
            valid=run.log.valid and not run.num_failed,
            functional=self.settings.scenario_duration_s < MLPERF_MIN_DURATION_S,
            tokens_per_second=tokens_per_s,
            queries_per_second=queries_per_s,
            num_failed=run.num_failed,
            log_dir=str(run.log_dir.relative_to(self.node_dir)),
            reason="; ".join(reasons) or None,
        )
