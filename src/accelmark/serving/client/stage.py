"""One stage of the load in a process of the client: closed or open loop, the records of its requests, and its lag."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, final

from accelmark.serving.client.connection import Connections, NotSentError, Response
from accelmark.serving.client.messages import Done, Ended, First, Open, Request
from accelmark.serving.client.stream import Stream, has_output, read_stream
from accelmark.spec.log.serving import RequestRecord, RequestStatus

_LAG_PERIOD_S: Final = 0.01
_PAUSE_S: Final = 0.1
"""Before a slot of a closed loop goes on after a request without any answer, so that a dead server is not flooded."""

_HTTP_OK: Final = 200
_SHOWN_BYTES: Final = 300

Sendable = tuple[Request, bytes]
"""A request and its body."""


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with what arrived for it; times are of ``time.monotonic_ns``."""

    request: Request
    due_ns: int
    end_ns: int
    response: Response
    status: RequestStatus | None = None
    """Where it was given up; null where the response decides."""
    error: str | None = None


@final
class StageRunner:
    """Sends the requests of a stage and gives the record of each to ``emit`` when it ended."""

    def __init__(self, order: Open, connections: Connections, emit: Callable[[Ended | First], None]) -> None:
        self._order = order
        self._connections = connections
        self._emit = emit
        self._waiting: asyncio.Queue[Sendable | None] = asyncio.Queue()
        self._ended: asyncio.Queue[Exchange] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cancelled = False
        self._begin_ns = 0
        self._end_ns = 0

    def add(self, request: Request, body: bytes) -> None:
        """Take a request."""
        self._waiting.put_nowait((request, body))

    def close(self) -> None:
        """Take note that there are no more requests."""
        self._waiting.put_nowait(None)

    def cancel(self) -> None:
        """Give up all requests in progress, which are recorded as cancelled, and start none."""
        self._is_cancelled = True
        for task in self._tasks:
            task.cancel()

    async def run(self, begin_ns: int) -> Done:
        """Run the stage from ``begin_ns`` (``time.monotonic_ns``) to the end of its last request."""
        self._begin_ns = self._end_ns = begin_ns
        lags_s: list[float] = []
        gc.collect()
        gc.disable()  # a collection would delay all streams
        try:
            await _sleep_until(begin_ns)
            cpu_s = time.process_time()
            async with asyncio.TaskGroup() as beside:
                sampling = beside.create_task(_sample_lag(lags_s))
                recording = beside.create_task(self._record())
                slots = self._order.slots
                for work in (self._send_when_due(),) if slots is None else (self._send_in_turn() for _ in range(slots)):
                    self._start(work)
                while self._tasks:
                    await asyncio.wait(self._tasks)
                await self._ended.join()
                sampling.cancel()
                recording.cancel()
        finally:
            gc.enable()
        lags_s.sort()
        return Done(
            end_s=(self._end_ns - begin_ns) / 1e9,
            lag_p50_ms=_percentile_ms(lags_s, 0.5),
            lag_p99_ms=_percentile_ms(lags_s, 0.99),
            cpu_s=time.process_time() - cpu_s,
        )

    def _start(self, work: Coroutine[None, None, None]) -> None:
        if self._is_cancelled:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(raise_failure)

    async def _send_in_turn(self) -> None:
        """Send a request as soon as the one before ended."""
        due_ns = self._begin_ns
        until_ns = self._begin_ns + round(self._order.until_s * 1e9)
        while due_ns < until_ns and not self._is_cancelled and (found := await self._next()) is not None:
            exchange = await self._exchange(*found, due_ns)
            due_ns = exchange.end_ns
            if exchange.response.status is None and exchange.status != "timed_out":
                await asyncio.sleep(_PAUSE_S)
                due_ns = time.monotonic_ns()

    async def _send_when_due(self) -> None:
        """Send each request at its time, whatever is in progress."""
        while (found := await self._next()) is not None:
            due_ns = self._begin_ns + round((found[0].due_s or 0.0) * 1e9)
            await _sleep_until(due_ns)
            self._start(self._send(*found, due_ns))

    async def _send(self, request: Request, body: bytes, due_ns: int) -> None:
        await self._exchange(request, body, due_ns)

    async def _next(self) -> Sendable | None:
        found = await self._waiting.get()
        if found is None:
            self._waiting.put_nowait(None)  # for the other slots
        return found

    async def _exchange(self, request: Request, body: bytes, due_ns: int) -> Exchange:
        """Send a request, wait for its end, and queue what arrived."""
        response = Response(reused=False)
        if self._order.reports_first:
            response.on_piece = partial(self._look_for_output, request.number, response)
        status: RequestStatus | None = None
        error = None
        try:
            async with asyncio.timeout(self._order.timeout_s):
                await self._connections.post(body, response)
        except TimeoutError:
            status, error = "timed_out", f"no end within {self._order.timeout_s:g} s"
        except NotSentError as found:
            status, error = "dropped", str(found)
        except asyncio.CancelledError:
            status, error = "cancelled", "the run was stopped"
        end_ns = response.end_ns if status is None else time.monotonic_ns()
        exchange = Exchange(request, due_ns, end_ns, response, status, error)
        self._end_ns = max(self._end_ns, end_ns)
        self._ended.put_nowait(exchange)
        return exchange

    def _look_for_output(self, number: int, response: Response) -> None:
        """Report the first output of a request."""
        if has_output(response.pieces):
            response.on_piece = None
            self._emit(First(number=number))

    async def _record(self) -> None:
        """Read the responses that ended, one after the other, so that new requests are not delayed by all of them."""
        while True:
            exchange = await self._ended.get()
            self._emit(await record_of(exchange, self._order.stage, self._begin_ns))
            self._ended.task_done()


def raise_failure(task: asyncio.Task[None]) -> None:
    """Raise what ended the task, to the loop's exception handler."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _sleep_until(at_ns: int) -> None:
    await asyncio.sleep(max(0.0, (at_ns - time.monotonic_ns()) / 1e9))


async def _sample_lag(lags_s: list[float]) -> None:
    """Append how late a timer ran, a hundred times a second."""
    while True:
        due_ns = time.monotonic_ns() + round(_LAG_PERIOD_S * 1e9)
        await _sleep_until(due_ns)
        lags_s.append((time.monotonic_ns() - due_ns) / 1e9)


def _percentile_ms(ordered_s: list[float], share: float) -> float | None:
    """Return a percentile of sorted seconds, in ms: the nearest rank."""
    if not ordered_s:
        return None
    return round(1e3 * ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))], 4)


async def record_of(exchange: Exchange, stage: int, begin_ns: int) -> Ended:
    """Return the record of a request, with times from ``begin_ns``, and the answer's text."""
    request, response = exchange.request, exchange.response
    is_stream = response.status == _HTTP_OK and response.content_type.startswith("text/event-stream")
    stream = await read_stream(response.pieces, response.arrivals_ns) if is_stream else Stream()
    status, error = (exchange.status, exchange.error) if exchange.status else _status(response, stream, is_stream)
    arrivals = [round((at_ns - begin_ns) / 1e3) for at_ns in stream.arrivals_ns]
    record = RequestRecord(
        stage=stage,
        number=request.number,
        prompt=request.prompt,
        due_s=_seconds(exchange.due_ns - begin_ns),
        sent_s=None if response.sent_ns is None else _seconds(response.sent_ns - begin_ns),
        first_s=arrivals[0] / 1e6 if arrivals else None,
        end_s=_seconds(exchange.end_ns - begin_ns),
        gaps_us=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        status=status,
        http_status=response.status,
        error=" ".join(error.split()) if error else None,
        finish_reason=stream.finish_reason,
        input_tokens=request.input_tokens,
        requested_tokens=request.requested_tokens,
        usage_input=stream.usage_input,
        usage_output=stream.usage_output,
        queue_s=None if stream.queue_ms is None else round(stream.queue_ms / 1e3, 6),
        text_sha256=hashlib.sha256(stream.text.encode()).hexdigest() if is_stream else None,
    )
    return Ended(record=record, text=stream.text)


def _status(response: Response, stream: Stream, is_stream: bool) -> tuple[RequestStatus, str | None]:
    if response.is_malformed:
        return "malformed", response.error
    if response.error:
        return "dropped", response.error
    if response.status != _HTTP_OK:
        return "http_error", f"HTTP {response.status}: {_message(b''.join(response.pieces))}"
    if not is_stream:
        return "malformed", f"the response is {response.content_type or 'without a type'}, not text/event-stream"
    if stream.server_error:
        return "http_error", f"error in the stream: {stream.server_error}"
    if stream.malformed:
        return "malformed", stream.malformed
    if not stream.is_done and stream.finish_reason is None:
        return "malformed", "the stream ended without a finish_reason and without [DONE]"
    return "ok", None


def _message(body: bytes) -> str:
    """Return the message of an error's body, which most servers send as JSON."""
    try:
        found = json.loads(body)
    except ValueError:
        return body[:_SHOWN_BYTES].decode("utf-8", errors="replace")
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return str(found)[:_SHOWN_BYTES]


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / 1e9, 6)
