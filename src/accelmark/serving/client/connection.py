"""HTTP/1.1 connections with the arrival of every piece of a response, its server-sent events, a precise event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import select
import selectors
import socket
import ssl
import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json

from accelmark import __version__
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import first_line, raising

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EVENTS_AT_ONCE: Final = 64
"""Events that are read before other connections get their turn: about 0.1 ms."""
_REASONING: Final = ("reasoning_content", "reasoning")
"""Keys of the text that a model writes before its answer."""


@dataclass
class Stream:
    """Content of a stream of completions."""

    arrivals_ns: list[int] = field(default_factory=list)
    """Arrival of each event that has text."""
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage_input: int | None = None
    usage_output: int | None = None
    queue_ms: float | None = None
    is_done: bool = False
    """Whether ``[DONE]`` arrived."""
    server_error: str | None = None
    malformed: str | None = None
    """The first violation of the API; later events were not read."""

    def add(self, event: Any, arrived_ns: int) -> None:
        """Take one event, as JSON values, or the ValueError of what is not JSON. Raises _MalformedError."""
        if isinstance(event, ValueError):
            raise _MalformedError("an event is not JSON")
        if not isinstance(event, dict):
            raise _MalformedError("an event is not a JSON object")
        if (error := event.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self.server_error = str(message or error)
            return
        choices = event.get("choices") or ()
        if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, dict) for choice in choices):
            raise _MalformedError("choices: is not a list of JSON objects")
        for choice in choices:
            if text := _text_of(choice):
                self.parts.append(text)
                self.arrivals_ns.append(arrived_ns)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if isinstance(usage := event.get("usage"), dict):
            self.usage_input = _count(usage, "prompt_tokens", self.usage_input)
            self.usage_output = _count(usage, "completion_tokens", self.usage_output)
        metrics = event.get("metrics")  # vLLM, "Per-Request Metrics"
        if isinstance(metrics, dict) and isinstance(waited := metrics.get("queue_time_ms"), (int, float)):
            self.queue_ms = float(waited)

    def add_plain(self, event: Any, arrived_ns: int) -> bool:
        """Take an event of one choice with nothing but text, as most are; return False for any other."""
        try:
            (choice,) = event["choices"]
            delta = choice.get("delta")
            text = choice["text"] if delta is None else delta["content"]
            if choice.get("finish_reason") or event.get("usage") or (delta is not None and len(delta) > 2):
                return False
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        if type(text) is not str or not text:
            return False
        self.parts.append(text)
        self.arrivals_ns.append(arrived_ns)
        return True


class _MalformedError(Exception):
    """An event is not as the API defines it."""


async def read_stream(pieces: Sequence[bytes], arrivals_ns: Sequence[int]) -> Stream:
    """Read the body of a response, which arrived in ``pieces``; other connections get their turn in between."""
    stream = Stream()
    events = _events(pieces, arrivals_ns)
    while batch := list(islice(events, _EVENTS_AT_ONCE)):
        for (payload, arrived_ns), value in zip_strict(batch, _values([payload for payload, _ in batch])):
            if stream.add_plain(value, arrived_ns):
                continue
            if payload.strip() == b"[DONE]":
                stream.is_done = True
                return stream
            try:
                stream.add(value, arrived_ns)
            except _MalformedError as error:
                shown = payload.strip()[:80].decode("utf-8", errors="replace")
                stream.malformed = f"{error}: {shown!r}"
                return stream
        await asyncio.sleep(0)
    return stream


def has_output(pieces: Sequence[bytes]) -> bool:
    """Return whether an event with text is in the received part of a body."""
    stream = Stream()
    for payload, _ in _events(pieces, [0] * len(pieces)):
        with contextlib.suppress(_MalformedError):  # the end, or the rest of it has not arrived
            stream.add(_value(payload), 0)
    return bool(stream.parts)


def _events(pieces: Sequence[bytes], arrivals_ns: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each event with its arrival; comments and other fields are left out."""
    for number, piece in enumerate(pieces):
        if piece.find(b"\n\n") != len(piece) - 2 or piece[:5] != b"data:" or piece.find(b"\n") != len(piece) - 2:
            break
        yield piece[5:-2], arrivals_ns[number]  # a piece is an event, as most are
    else:
        return
    pieces, arrivals_ns = pieces[number:], arrivals_ns[number:]
    body, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    begin = index = 0
    for match in _EVENT_END.finditer(body):
        block, begin = body[begin : match.start()], match.end()
        index = bisect_left(ends, begin, index)
        if payload := _payload(block):
            yield payload, arrivals_ns[index]
    if payload := _payload(body[begin:]):  # a last event without its blank line
        yield payload, arrivals_ns[-1]


def _payload(block: bytes) -> bytes:
    if block.startswith(b"data:") and b"\n" not in block and b"\r" not in block:
        return block[5:].strip()
    lines = (line for line in _LINE_END.split(block) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines).strip()


def _values(payloads: Sequence[bytes]) -> list[Any]:
    """Parse JSON in one call, since calls cost more than bytes; other texts become their ValueError."""
    texts = [b"null" if payload.strip() == b"[DONE]" else payload for payload in payloads]
    try:
        values: list[Any] = from_json(b"[%b]" % b",".join(texts))
    except ValueError:
        values = []
    return values if len(values) == len(texts) else [_value(text) for text in texts]


def _value(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        return error


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    texts = [choice.get("text")]
    if isinstance(delta, dict):
        texts = [next((delta[name] for name in _REASONING if delta.get(name)), None), delta.get("content")]
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise _MalformedError("the text of a choice is not a string")
    return "".join(text for text in texts if text)


def _count(usage: dict[str, Any], name: str, before: int | None) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else before


_AWAKE_S: Final = 0.0003
"""Time before a timer is due from which the process waits without sleeping: longer than most wake-ups take."""


class WakeSelector(selectors.EpollSelector):
    """epoll that waits to the microsecond, notes when it returned, and calls the readers of streams itself.

    ``epoll_wait`` rounds to milliseconds; ``select(2)`` on the descriptor of epoll does not, but wakes a process late:
    by the kernel's timer slack (50 µs) and the processor's idle state (0.1 to 0.2 ms in a virtual machine). So the last
    part of a wait for a timer is active. Data that were ready when it returned arrived at ``woke_ns``, however many
    connections are read before theirs; data that woke the process arrived earlier, when the kernel says
    (``has_slept``). Streams have an epoll of their own: a turn of the event loop for each takes as long as reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.woke_ns = 0
        """``time.monotonic_ns`` when the latest call returned."""
        self.has_slept = False
        """Whether the latest call slept until data or another process woke it."""
        self._streams = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, read: Callable[[], None]) -> None:
        """Call ``read`` whenever a stream has data."""
        self._readers[descriptor] = read
        self._streams.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop; a stream that is not watched is ignored."""
        if self._readers.pop(descriptor, None) is not None:
            self._streams.unregister(descriptor)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait up to ``timeout`` seconds (None: without limit) for ready files; read the streams among them."""
        ready, streams = super().select(0), self._streams.poll(0)
        self.has_slept = False
        if not ready and not streams and (timeout is None or timeout > 0):
            until_s = math.inf if timeout is None else time.monotonic() + timeout
            asleep_s = None if timeout is None else timeout - _AWAKE_S
            if asleep_s is None or asleep_s > 0:
                select.select((self.fileno(), self._streams.fileno()), (), (), asleep_s)
                ready, streams = super().select(0), self._streams.poll(0)
                self.has_slept = bool(ready or streams)
            while not ready and not streams and time.monotonic() < until_s:
                ready, streams = super().select(0), self._streams.poll(0)
        self.woke_ns = time.monotonic_ns()
        readers = self._readers
        for descriptor, _ in streams:
            if (read := readers.get(descriptor)) is not None:  # a reader before it may have closed it
                read()
        return ready


_STAMPS: Final = 35
"""``SO_TIMESTAMPNS`` of Linux, which Python's socket module does not name: the time when the kernel received data."""
_STAMP: Final = struct.Struct("qq")
"""Seconds and nanoseconds of ``CLOCK_REALTIME``."""
_LATEST_NS: Final = 1_000_000_000
"""Greatest age of a time of the kernel; others are of a clock that was set meanwhile."""


@dataclass
class Response:
    """The data that arrived for a request. Times are of ``time.monotonic_ns``."""

    sent_ns: int | None = None
    """When the last byte of the request was given to the kernel."""
    end_ns: int = 0
    """When its end arrived, or when the connection was lost."""
    status: int | None = None
    content_type: str = ""
    pieces: list[bytes] = field(default_factory=list)
    arrivals_ns: list[int] = field(default_factory=list)
    """When each of ``pieces`` arrived."""
    on_piece: Callable[[], None] | None = None
    """Called after each piece; it may take itself out."""
    is_complete: bool = False
    is_malformed: bool = False
    """Whether the data is not HTTP."""
    error: str | None = None


class Connection(asyncio.BufferedProtocol):
    """A connection; the parser calls its ``on_`` methods. Without TLS it reads its socket itself (``WakeSelector``)."""

    def __init__(self, selector: WakeSelector, buffer: memoryview) -> None:
        self._selector = selector
        self._buffer = buffer
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._socket: socket.socket | None = None
        self._arrived_ns = 0
        self._response: Response | None = None
        self._ended: asyncio.Future[None] | None = None
        self._has_length = False
        self.is_open = False
        """Whether another request can be sent."""

    async def post(self, request: bytes, response: Response) -> None:
        """Send the bytes of a request and fill ``response`` until its end or the loss of the connection."""
        self._response = response
        self._ended = asyncio.get_running_loop().create_future()
        self._has_length = False
        self._transport.write(request)
        if not self._transport.get_write_buffer_size() and response.sent_ns is None:
            response.sent_ns = time.monotonic_ns()
        try:
            await self._ended
        finally:
            self._response = None
            if not response.is_complete:
                self.abort()

    def abort(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._socket is not None:
            self._selector.unwatch(self._socket.fileno())
            self._socket.detach()  # the transport closes it
            self._socket = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self.is_open = True
        if transport.get_extra_info("ssl_object") is None:
            self._transport.pause_reading()
            self._socket = socket.socket(fileno=transport.get_extra_info("socket").fileno())
            with contextlib.suppress(OSError):  # without them, data arrive when the process has woken
                self._socket.setsockopt(socket.SOL_SOCKET, _STAMPS, 1)
            self._selector.watch(self._socket.fileno(), self._read)

    def _read(self) -> None:
        if self._socket is None:
            return
        self._arrived_ns = woke_ns = self._selector.woke_ns
        try:
            if self._selector.has_slept:
                nbytes, stamps, _, _ = self._socket.recvmsg_into((self._buffer,), socket.CMSG_SPACE(_STAMP.size))
                sent_ns = self._response.sent_ns if self._response is not None else None
                self._arrived_ns = max(_arrival_ns(stamps, woke_ns), sent_ns or 0)
            else:
                nbytes = os.readv(self._socket.fileno(), (self._buffer,))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
        else:
            if nbytes:
                self.buffer_updated(nbytes)
            else:
                self._lose(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next data of a connection with TLS."""
        self._arrived_ns = self._selector.woke_ns
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse data that arrived."""
        if self._response is None:  # there is no request
            self.abort()
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            if self._response is not None and not self._response.is_complete:
                self._response.is_malformed = True
                self._finish(f"not HTTP: {first_line(error)}")
            self.abort()

    def resume_writing(self) -> None:
        """Note that all was sent."""
        if self._response is not None and self._response.sent_ns is None:
            self._response.sent_ns = time.monotonic_ns()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response that was under way."""
        self._arrived_ns = self._selector.woke_ns
        self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        self.abort()
        response = self._response
        if response is None or response.is_complete or response.error:
            return
        if response.status is not None and not self._has_length and exc is None:
            response.is_complete = True  # it ends with the connection
            self._finish(None)
        else:
            self._finish(f"connection lost: {first_line(exc) if exc else 'closed by the server'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record the headers that determine where the body ends, and its type."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif name == b"content-type" and self._response is not None:
            self._response.content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        """Note the status."""
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body with its arrival."""
        response = self._response
        if response is not None:
            response.pieces.append(body)
            response.arrivals_ns.append(self._arrived_ns)
            if response.on_piece is not None:
                response.on_piece()

    def on_message_complete(self) -> None:
        """End the response; responses of status 100 to 199 precede the actual response."""
        if self._response is None or self._response.status is None:
            return
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._response.is_complete = True
        self._finish(None)

    def _finish(self, error: str | None) -> None:
        if self._response is not None and self._ended is not None and not self._ended.done():
            self._response.error = error
            self._response.end_ns = self._arrived_ns if error is None else self._selector.woke_ns
            self._ended.set_result(None)


def _arrival_ns(stamps: Sequence[tuple[int, int, bytes]], woke_ns: int) -> int:
    """Return when the kernel received data, on the clock of ``time.monotonic_ns``; without its time ``woke_ns``."""
    for level, kind, stamp in stamps:
        if (level, kind) == (socket.SOL_SOCKET, _STAMPS) and len(stamp) == _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack(stamp)
            before_ns = time.time_ns() - (seconds * 1_000_000_000 + nanoseconds)
            arrived_ns = time.monotonic_ns() - before_ns
            return arrived_ns if woke_ns - _LATEST_NS < arrived_ns < woke_ns else woke_ns
    return woke_ns


class Connections:
    """Connections to one URL; idle connections are used again, the latest first."""

    def __init__(self, url: str, selector: WakeSelector, token: str | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._selector = selector
        self._buffer = memoryview(bytearray(1 << 18))
        self._idle: list[Connection] = []
        lines = [
            f"POST {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            f"User-Agent: accelmark/{__version__}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
        ]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        self._head = "\r\n".join(lines).encode("latin-1") + b"\r\nContent-Length: "

    async def post(self, body: bytes, response: Response) -> None:
        """Send a request and fill ``response`` as data arrive, also where the connection is lost.

        A kept connection that the server closes before it answers is replaced: closing idle connections is its right,
        and no failure. Raises ConnectionError: no connection could be made.
        """
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while True:
            while self._idle and not self._idle[-1].is_open:
                self._idle.pop()
            is_reused = bool(self._idle)
            connection = self._idle.pop() if is_reused else await self._connect()
            await connection.post(request, response)
            if connection.is_open:
                self._idle.append(connection)
            if not (is_reused and response.error and not response.is_malformed and response.status is None):
                return
            response.sent_ns, response.error, response.end_ns = None, None, 0

    async def _connect(self) -> Connection:
        # refused, unknown or impossible host, no certificate
        with raising(ConnectionError, f"cannot connect to {self._host}:{self._port}", OSError, UnicodeError):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._selector, self._buffer), self._host, self._port, ssl=self._tls
            )
        return connection
