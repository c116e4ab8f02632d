"""Run the stages of a load one after the other, with their events, progress, records and a sample of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol, final

from accelmark.results.read.requests import Requests, RequestTable
from accelmark.serving.answers import AnswerSample
from accelmark.serving.model import ServedModel
from accelmark.serving.request import Load, PlannedRequest, Record, Watch
from accelmark.spec.log.events import Event
from accelmark.spec.log.serving import SCENARIO_PHASES, LoadPhase, LoadProgress, LoadStage, RequestRecord

_OVERDUE: Final = 0.99
"""Share of a load that takes longer than planned."""


@final
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


@final
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
