"""One stage of a load, shared by the processes of a client: planned beforehand, or submitted request by request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, final

from accelmark.serving.client.messages import (
    Begin,
    Close,
    Done,
    Ended,
    First,
    FromClient,
    Open,
    Ready,
    Request,
    line,
)
from accelmark.serving.request import Endpoint, Load, PlannedRequest
from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import LoadStage, RequestRecord

Record = Callable[[RequestRecord, str], object]
"""Called with the record of each request that ended and the text of its answer."""

_START_S: Final = 120.0
"""Limit of the start of the processes."""
_LEAD_S: Final = 0.2
"""From the message that a stage begins to its beginning."""
_AHEAD_S: Final = 5.0
"""Time before it is due at which a request is given to its process."""
_SPARE_REQUESTS: Final = 16
"""Requests of a closed loop that a process holds in addition to twice those in progress."""
_WATCH_S: Final = 0.2


class Processes(Protocol):
    """The processes of a client; ``send`` and ``receive`` raise RunError where one of them ended."""

    @property
    def num_processes(self) -> int:
        """Number of processes."""

    @property
    def target(self) -> Endpoint:
        """The service."""

    def send(self, process: int, *parts: bytes) -> None:
        """Write to a process."""

    def receive(self, timeout_s: float) -> tuple[int, FromClient] | None:
        """Return the next message with the number of its process, None if there is none in time."""


class _SharedStage:
    """What both kinds of stages share."""

    def __init__(self, client: Processes, load: Load, record: Record, watch: Callable[[], None]) -> None:
        self._client = client
        self._load = load
        self._record = record
        self._watch = watch
        self._turn = 0
        self._num_requests = 0
        self._is_closed = False

    def _open(self, slots: Sequence[int | None], *, reports_first: bool) -> None:
        for process, each in enumerate(slots):
            order = Open(
                stage=self._load.stage,
                slots=each,
                until_s=self._load.until_s,
                timeout_s=self._load.timeout_s,
                reports_first=reports_first,
            )
            self._client.send(process, line(order))

    def _begin(self) -> int:
        """Wait until the processes have read what they were sent, and let the stage begin; return when (ns)."""
        self._send_all(Ready())
        num_left, end_s = self._client.num_processes, time.monotonic() + _START_S
        while num_left:
            if time.monotonic() > end_s:
                raise RunError(f"the client did not start within {_START_S:g} s")
            self._watch()
            num_left -= self._client.receive(_WATCH_S) is not None
        begin_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        self._send_all(Begin(mono_ns=begin_ns))
        return begin_ns

    def _send(self, process: int, request: PlannedRequest, due_s: float | None) -> None:
        body = self._client.target.body(request)
        message = Request(
            number=request.number,
            prompt=request.prompt,
            requested_tokens=request.requested_tokens,
            due_s=due_s,
            input_tokens=request.input_tokens,
            num_bytes=len(body),
        )
        self._client.send(process, line(message), body)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._send_all(Close())

    def _send_all(self, message: Begin | Close | Ready) -> None:
        for process in range(self._client.num_processes):
            self._client.send(process, line(message))

    def _next_process(self) -> int:
        """Return the process whose turn it is."""
        process, self._turn = self._turn, (self._turn + 1) % self._client.num_processes
        return process

    def _result(self, begin_ns: int, done: Sequence[Done]) -> LoadStage:
        duration_s = max(each.end_s for each in done)
        return self._load.ended(
            begin_ns,
            duration_s,
            self._num_requests,
            lag_p50_ms=_greatest([each.lag_p50_ms for each in done]),
            lag_p99_ms=_greatest([each.lag_p99_ms for each in done]),
            client_cpu_share=max(each.cpu_s for each in done) / duration_s if duration_s else 0.0,
        )


@final
class PlannedStage(_SharedStage):
    """A stage whose requests are planned: a closed loop, or an open one with the times at which requests are due."""

    def __init__(
        self,
        client: Processes,
        requests: Iterable[PlannedRequest],
        load: Load,
        record: Record,
        watch: Callable[[], None],
    ) -> None:
        super().__init__(client, load, record, watch)
        self._requests = iter(requests)
        self._next: PlannedRequest | None = next(self._requests, None)
        self._last_due_s = load.until_s

    def run(self) -> LoadStage:
        """Run it to the end of its last request."""
        processes = range(self._client.num_processes)
        slots = [
            None if self._load.concurrency is None else _share(self._load.concurrency, processes, one)
            for one in processes
        ]
        self._open(slots, reports_first=False)
        self._fill(slots)
        begin_ns = self._begin()
        return self._result(begin_ns, self._follow(begin_ns / 1e9))

    def _fill(self, slots: list[int | None]) -> None:
        """Give the processes the requests of their beginning."""
        if self._load.concurrency is None:
            self._give_due(_AHEAD_S)
            return
        wanted = [2 * each + _SPARE_REQUESTS if each else 0 for each in slots]
        for round_ in range(max(wanted)):
            for process, number in enumerate(wanted):
                if round_ < number:
                    self._give(process)

    def _follow(self, begin_s: float) -> list[Done]:
        """Give further requests and take records until all processes are done."""
        done: list[Done] = []
        watch_s = 0.0
        while len(done) < self._client.num_processes:
            now_s = time.monotonic()
            if now_s >= watch_s:
                self._watch()
                watch_s = now_s + _WATCH_S
            if self._load.concurrency is None:
                self._give_due(now_s - begin_s + _AHEAD_S)
            elif now_s - begin_s >= self._load.until_s:
                self._close()
            if now_s - begin_s > self._last_due_s + self._load.timeout_s + _START_S:
                raise RunError("the client did not end its requests in time")
            if (found := self._client.receive(_WATCH_S)) is None:
                continue
            process, message = found
            if isinstance(message, Done):
                done.append(message)
            elif isinstance(message, Ended):
                self._num_requests += 1
                if self._load.concurrency is not None:
                    self._give(process)
                self._record(message.record, message.text)
        return done

    def _give_due(self, until_s: float) -> None:
        """Give all requests that are due before a time, to the processes in turn."""
        while self._next is not None and (self._next.due_s or 0.0) < until_s:
            self._last_due_s = max(self._last_due_s, self._next.due_s or 0.0)
            self._give(self._next_process())
        if self._next is None:
            self._close()

    def _give(self, process: int) -> None:
        """Give the next request to a process."""
        request = self._next
        if request is None or self._is_closed:
            self._close()
            return
        self._send(process, request, request.due_s)
        self._next = next(self._requests, None)


class Answered(Protocol):
    """What a submitted request reports."""

    def on_first(self) -> None:
        """Take note that its first output arrived."""

    def on_done(self, record: RequestRecord) -> None:
        """Take its record, at its end."""


@final
class LiveStage(_SharedStage):
    """A stage whose requests are submitted one by one and are due when they are submitted."""

    def __init__(
        self,
        client: Processes,
        load: Load,
        record: Callable[[RequestRecord, str], RequestRecord],
        watch: Callable[[], None],
    ) -> None:
        """Open the stage in the processes; ``record`` completes each record, with the tokens of the answer."""
        super().__init__(client, load, record, watch)
        self._completed = record
        self._answered: dict[int, Answered] = {}
        self._open([None] * client.num_processes, reports_first=True)
        self._begin_ns = self._begin()

    def submit(self, request: PlannedRequest, answered: Answered) -> None:
        """Send a request; from any thread, but not from two at the same time.

        Raises:
            RunError: a process of the client ended.
        """
        self._answered[request.number] = answered
        self._send(self._next_process(), request, max(0.0, (time.monotonic_ns() - self._begin_ns) / 1e9))

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Report outputs and ends of requests until ``is_over``, which is called several times a second."""
        watch_s = 0.0
        while not is_over():
            if (now_s := time.monotonic()) >= watch_s:
                self._watch()
                watch_s = now_s + _WATCH_S
            if (found := self._client.receive(_WATCH_S)) is not None:
                self._take(found[1])

    def finish(self) -> LoadStage:
        """Wait for the requests in progress, and return the stage."""
        self._close()
        done: list[Done] = []
        end_s = time.monotonic() + self._load.timeout_s + _START_S
        while len(done) < self._client.num_processes:
            if time.monotonic() > end_s:
                raise RunError("the client did not end its requests in time")
            self._watch()
            if (found := self._client.receive(_WATCH_S)) is None:
                continue
            if isinstance(found[1], Done):
                done.append(found[1])
            else:
                self._take(found[1])
        return self._result(self._begin_ns, done)

    def _take(self, message: FromClient) -> None:
        if isinstance(message, First):
            self._answered[message.number].on_first()
        elif isinstance(message, Ended):
            self._num_requests += 1
            record = self._completed(message.record, message.text)
            self._answered.pop(record.number).on_done(record)


def _share(concurrency: int, processes: Sequence[int], process: int) -> int:
    return concurrency // len(processes) + (process < concurrency % len(processes))


def _greatest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
