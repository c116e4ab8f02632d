"""A process of the client, ``python -m accelmark.serving.client.stage URL``, carries out stages of the load.

Messages are one line of JSON each. For each stage the parent sends a :class:`StageOrder` and its first requests, each a
:class:`Request` and its body. The client answers :class:`Ready`, gets the ``time.monotonic_ns`` at which the stage
begins, and then further requests, up to the line ``null``. It sends each request that ended, and :class:`Done`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

from pydantic import Field, TypeAdapter

from accelmark.serving import loadgen
from accelmark.serving.client.connection import Connections, Response, Stream, WakeSelector, has_output, read_stream
from accelmark.serving.request import Load, LoadGenRun
from accelmark.spec.backports import pairwise
from accelmark.spec.log.inference import RequestRecord, RequestStatus
from accelmark.spec.model import Spec

_LAG_PERIOD_S: Final = 0.01
_PAUSE_S: Final = 0.1
"""Pause of a slot of a closed loop after a request without any answer, so that a dead server is not flooded."""

_MOST_CONNECTIONS: Final = 4096
"""Queries in progress at most: more than servers compute together, fewer than they accept, and than there are ports."""


class StageOrder(Spec):
    """A stage, as a process of the client carries it out."""

    load: Load
    slots: int | None
    """Requests in progress in a closed loop; null: each is sent when it is due."""
    num_first: int
    """Requests that are sent before the stage begins."""


class Request(Spec):
    """A request of the stage; its body follows the line."""

    number: int
    prompt: int
    requested_tokens: int
    due_s: float | None
    input_tokens: int | None
    num_bytes: int


class Ready(Spec):
    """The first requests of the stage were read."""

    kind: Literal["ready"] = "ready"


class Ended(Spec):
    """A request ended."""

    kind: Literal["ended"] = "ended"
    record: RequestRecord
    text: str


class Done(Spec):
    """The stage ended in this process."""

    kind: Literal["done"] = "done"
    end_s: float
    """End of the last request, from the beginning of the stage."""
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    cpu_s: float


FromClient = Annotated[Union[Ready, Ended, Done], Field(discriminator="kind")]
FROM_CLIENT: Final[TypeAdapter[FromClient]] = TypeAdapter(FromClient)


def line(message: Spec) -> bytes:
    """Return the message as a line."""
    return message.model_dump_json().encode() + b"\n"


Sendable = tuple[Request, bytes]


class Exchange(NamedTuple):
    """A request with its response; times are of ``time.monotonic_ns``."""

    request: Request
    due_ns: int
    end_ns: int
    response: Response
    status: RequestStatus | None = None
    """Status of a request that was given up; None where the response decides."""
    error: str | None = None
    query: int | None = None


class StageRunner:
    """Sends the requests of a stage and gives the record of each to ``emit`` when it ended."""

    def __init__(self, order: StageOrder, connections: Connections, emit: Callable[[Ended], None]) -> None:
        self._load = order.load
        self._slots = order.slots
        self._connections = connections
        self._emit = emit
        self._waiting: asyncio.Queue[Sendable | None] = asyncio.Queue()
        self._ended: asyncio.Queue[Exchange] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._queries: deque[tuple[int, int]] = deque()
        """Queries of LoadGen for which no request was sent, with the times at which they are due."""
        self._num_answering = 0
        self._tokenizer: Any = None
        self._is_cancelled = False
        self._begin_ns = 0
        self._end_ns = 0

    def add(self, request: Sendable | None) -> None:
        """Take a request; None after the last one."""
        self._waiting.put_nowait(request)

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
            beside = [asyncio.create_task(work) for work in (_sample_lag(lags_s), self._record_all())]
            for task in beside:
                task.add_done_callback(raise_failure)
            if self._load.loadgen is not None:
                self._start(self._send_for(self._load.loadgen))
            elif self._slots is None:
                self._start(self._send_when_due())
            for _ in range(self._slots or 0):
                self._start(self._send_in_turn())
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._ended.join()
            for task in beside:
                task.cancel()
        finally:
            gc.enable()
        lags_s.sort()
        lags_ms = [round(1e3 * lags_s[int(share * len(lags_s))], 4) if lags_s else None for share in (0.5, 0.99)]
        return Done(
            end_s=(self._end_ns - begin_ns) / 1e9,
            lag_p50_ms=lags_ms[0],
            lag_p99_ms=lags_ms[1],
            cpu_s=time.process_time() - cpu_s,
        )

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        if self._is_cancelled:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(raise_failure)

    async def _send_in_turn(self) -> None:
        due_ns = self._begin_ns
        until_ns = self._begin_ns + round(self._load.until_s * 1e9)
        while due_ns < until_ns and not self._is_cancelled and (request := await self._next()) is not None:
            exchange = await self._exchange(*request, due_ns)
            due_ns = exchange.end_ns
            if exchange.response.status is None and exchange.status != "timed_out":
                await asyncio.sleep(_PAUSE_S)
                due_ns = time.monotonic_ns()

    async def _send_when_due(self) -> None:
        while (request := await self._next()) is not None:
            due_ns = self._begin_ns + round((request[0].due_s or 0.0) * 1e9)
            await _sleep_until(due_ns)
            self._start(self._exchange(*request, due_ns))

    async def _send_for(self, run: LoadGenRun) -> None:
        """Send a request for each query of LoadGen, which a thread runs to its end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if run.tokenizer_dir is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(run.tokenizer_dir / "tokenizer.json"))

        def issue(queries: Sequence[int]) -> None:
            loop.call_soon_threadsafe(send, queries, time.monotonic_ns())

        def send(queries: Sequence[int], due_ns: int) -> None:
            self._queries.extend((query, due_ns) for query in queries)
            most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            for _ in range(min(len(queries), most - self._num_answering)):
                self._num_answering += 1
                self._start(self._answer_queries())

        def work() -> None:
            try:
                loadgen.run_token_loadgen(run, issue)
            finally:
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name="loadgen", daemon=True).start()
        await ended.wait()

    async def _answer_queries(self) -> None:
        """Send a request for each query that waits; those of the Offline scenario are issued all at once."""
        while self._queries and not self._is_cancelled:
            query, due_ns = self._queries.popleft()
            if (request := await self._next()) is not None:
                await self._exchange(*request, due_ns, query)
        self._num_answering -= 1

    async def _next(self) -> Sendable | None:
        request = await self._waiting.get()
        if request is None:
            self._waiting.put_nowait(None)  # for the other slots
        return request

    async def _exchange(self, request: Request, body: bytes, due_ns: int, query: int | None = None) -> Exchange:
        response = Response()
        if query is not None:

            def report_output() -> None:
                if has_output(response.pieces):
                    response.on_piece = None
                    loadgen.first(query)

            response.on_piece = report_output
        status: RequestStatus | None = None
        error = None
        try:
            await asyncio.wait_for(self._connections.post(body, response), self._load.timeout_s)
        except asyncio.TimeoutError:
            status, error = "timed_out", f"no end within {self._load.timeout_s:g} s (request_timeout_s)"
        except ConnectionError as failure:
            status, error = "dropped", str(failure)
        except asyncio.CancelledError:
            status, error = "cancelled", "the run was stopped"
        end_ns = response.end_ns if status is None else time.monotonic_ns()
        exchange = Exchange(request, due_ns, end_ns, response, status, error, query)
        self._end_ns = max(self._end_ns, end_ns)
        self._ended.put_nowait(exchange)
        return exchange

    async def _record_all(self) -> None:
        """Read the responses that ended, one after the other, so that new requests are not delayed by all of them."""
        while True:
            exchange = await self._ended.get()
            ended = await record_of(exchange, self._load.stage, self._begin_ns)
            if exchange.query is not None:
                if exchange.response.on_piece is not None:  # LoadGen needs a first output of every query
                    loadgen.first(exchange.query)
                num_tokens = ended.record.usage_output
                if self._tokenizer is not None and ended.record.status == "ok":
                    num_tokens = len(self._tokenizer.encode(ended.text, add_special_tokens=False).ids)
                loadgen.done(exchange.query, num_tokens)
            self._emit(ended)
            self._ended.task_done()


def raise_failure(task: asyncio.Task[Any]) -> None:
    """Raise the task's exception, to the loop's exception handler."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _sleep_until(at_ns: int) -> None:
    await asyncio.sleep(max(0.0, (at_ns - time.monotonic_ns()) / 1e9))


async def _sample_lag(lags_s: list[float]) -> None:
    while True:
        due_ns = time.monotonic_ns() + round(_LAG_PERIOD_S * 1e9)
        await _sleep_until(due_ns)
        lags_s.append((time.monotonic_ns() - due_ns) / 1e9)


async def record_of(exchange: Exchange, stage: int, begin_ns: int) -> Ended:
    """Return the record of a request, with times from ``begin_ns``, and the answer's text."""
    request, response = exchange.request, exchange.response
    is_stream = response.status == HTTPStatus.OK and response.content_type.startswith("text/event-stream")
    stream = await read_stream(response.pieces, response.arrivals_ns) if is_stream else Stream()
    text = "".join(stream.parts)
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
        text_sha256=hashlib.sha256(text.encode()).hexdigest() if is_stream else None,
    )
    return Ended(record=record, text=text)


def _status(response: Response, stream: Stream, is_stream: bool) -> tuple[RequestStatus, str | None]:
    if response.is_malformed:
        return "malformed", response.error
    if response.error:
        return "dropped", response.error
    if response.status != HTTPStatus.OK:
        return "http_error", f"HTTP {response.status}: {_error_message(b''.join(response.pieces))}"
    if not is_stream:
        return "malformed", f"the response is {response.content_type or 'without a type'}, not text/event-stream"
    if stream.server_error:
        return "http_error", f"error in the stream: {stream.server_error}"
    if stream.malformed:
        return "malformed", stream.malformed
    if not stream.is_done and stream.finish_reason is None:
        return "malformed", "the stream ended without a finish_reason and without [DONE]"
    return "ok", None


def _error_message(body: bytes) -> str:
    """Return the message of an error's body, which most servers send as JSON."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode("utf-8", errors="replace")
    for name in ("error", "message", "detail"):
        value = value.get(name, value) if isinstance(value, dict) else value
    return str(value)[:300]


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / 1e9, 6)


API_KEY_VARIABLE: Final = "ACCELMARK_API_KEY"
"""Environment variable with the bearer token."""
_SWITCH_S: Final = 0.0005
"""Longest time for which the event loop delays LoadGen's threads, and the other way round."""


class _Output(asyncio.BaseProtocol):
    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


class _Client:
    def __init__(self, url: str, selector: WakeSelector) -> None:
        self._connections = Connections(url, selector, os.environ.get(API_KEY_VARIABLE))
        self._stage: StageRunner | None = None
        self._running: asyncio.Task[Done] | None = None
        self._input: asyncio.StreamReader
        self._output: asyncio.WriteTransport

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._input = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._input), sys.stdin)
        pipe = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # output of libraries is not a message
        self._output, output = await loop.connect_write_pipe(_Output, pipe)
        stages = loop.create_task(self._run_stages())
        loop.add_signal_handler(signal.SIGTERM, stages.cancel)
        await asyncio.wait((stages,))
        if self._stage is not None and self._running is not None:
            self._stage.cancel()
            await self._running
        self._output.close()
        await output.closed
        if not stages.cancelled():
            stages.result()

    async def _run_stages(self) -> None:
        while text := await self._input.readline():
            order = StageOrder.model_validate_json(text)
            stage = self._stage = StageRunner(order, self._connections, self._send)
            for _ in range(order.num_first):
                stage.add(await self._next_request())
            self._send(Ready())
            running = self._running = asyncio.create_task(stage.run(int(await self._input.readline())))
            running.add_done_callback(raise_failure)
            running.add_done_callback(lambda ended: self._send(ended.result()))
            while (request := await self._next_request()) is not None:
                stage.add(request)
            stage.add(None)
            await asyncio.wait((running,))

    async def _next_request(self) -> Sendable | None:
        text = await self._input.readline()
        if text == b"null\n":
            return None
        request = Request.model_validate_json(text)
        return request, await self._input.readexactly(request.num_bytes)

    def _send(self, message: Spec) -> None:
        self._output.write(line(message))


def main() -> None:
    """Run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    sys.setswitchinterval(_SWITCH_S)
    selector = WakeSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.set_exception_handler(_fail)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_Client(sys.argv[1], selector).run())
    os._exit(0)  # a thread of LoadGen may wait for answers that were given up


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process after an error that nothing expects: the parent reports it."""
    loop.default_exception_handler(context)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
