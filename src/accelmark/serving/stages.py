"""Run the stages of a load one after the other, with their events, records and a sample of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Protocol, final

from accelmark.results.read.requests import Requests, RequestTable
from accelmark.serving.answers import AnswerSample
from accelmark.serving.load.progress import LoadReporter
from accelmark.serving.model import ServedModel
from accelmark.serving.request import Load, PlannedRequest, Record
from accelmark.spec.log.events import Event
from accelmark.spec.log.serving import SCENARIO_PHASES, LoadStage, RequestRecord


class StageClient(Protocol):
    """Sends the requests of a stage."""

    def run_stage(
        self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Callable[[], None] = ...
    ) -> LoadStage:
        """Run one stage; call ``record`` with each request that ended, and ``watch`` at times."""


@final
class Stages:
    """The stages of a run so far."""

    def __init__(
        self,
        client: StageClient,
        model: ServedModel,
        emit: Callable[[Event, Any], None],
        stream: IO[str],
        sample: AnswerSample,
        check_server: Callable[[], None],
    ) -> None:
        """Take the common parts of all stages.

        Args:
            client: sends the requests.
            model: counts tokens.
            emit: takes the events.
            stream: takes a line for each request.
            sample: takes answers to compare.
            check_server: raises ServerDiedError if the server ended.
        """
        self.progress = LoadReporter(emit)
        self._client = client
        self._tokens = model.tokens
        self.tokenizer_dir = model.directory if model.has_tokenizer else None
        self._emit = emit
        self._stream = stream
        self._sample = sample
        self._check_server = check_server
        self._ended = RequestTable()

    def run(self, load: Load, requests: Iterable[PlannedRequest]) -> tuple[LoadStage, Requests]:
        """Run one stage; return it with its requests.

        Raises:
            ServerDiedError: the server ended.
            RunError: the client ended.
        """
        self._begin(load)
        done = self._client.run_stage(self._watched(requests), load, self._record, self._watch)
        self._stream.flush()
        self._emit(Event.LOAD_END, done)
        return done, self._ended.requests()

    def _watched(self, requests: Iterable[PlannedRequest]) -> Iterator[PlannedRequest]:
        """Yield the requests, whose prompts take time to draw: up to 0.1 s for one of 32,768 tokens."""
        for request in requests:
            self._watch()
            yield request

    def _begin(self, load: Load) -> None:
        self._ended = RequestTable()
        if load.stage < 0:
            self.progress.begin("warming up")
        else:
            phase = "under load" if load.loadgen is None else SCENARIO_PHASES[load.loadgen.scenario]
            self.progress.begin(phase, load.until_s, load.later_s)
        begun = {"stage": load.stage, "arrival": load.arrival, "concurrency": load.concurrency, "rate": load.rate}
        self._emit(Event.LOAD_BEGIN, begun)

    def _record(self, request: PlannedRequest, record: RequestRecord, text: str) -> None:
        """Write the record of a request that ended, with the tokens of its answer."""
        if self._tokens is not None and record.status == "ok" and record.output_tokens is None:
            record = record.model_copy(update={"output_tokens": len(self._tokens(text))})
        self._stream.write(record.model_dump_json() + "\n")
        self._ended.add(record)
        self.progress.num_requests += 1
        if record.stage >= 0 and record.status == "ok":
            self._sample.add(request, record, text)

    def _watch(self) -> None:
        self._check_server()
        self.progress.report()
