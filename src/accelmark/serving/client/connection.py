"""HTTP/1.1 connections: one request at a time, kept alive, with the arrival of every piece of a response's body."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, final
from urllib.parse import urlsplit

import httptools

from accelmark import __version__
from accelmark.serving.client.clock import WakeSelector
from accelmark.spec.errors import first_line

_BUFFER_BYTES: Final = 1 << 18
_STAMPS: Final = 35
"""``SO_TIMESTAMPNS`` of Linux, which Python's socket module does not name: the time when the kernel received data."""
_STAMP: Final = struct.Struct("qq")
"""Seconds and nanoseconds of ``CLOCK_REALTIME``."""
_LATEST_NS: Final = 1_000_000_000
"""Greatest age of a time of the kernel; others are of a clock that was set meanwhile."""


class NotSentError(Exception):
    """No connection could be made."""


@final
@dataclass
class Response:
    """The data that arrived for a request. Times are of ``time.monotonic_ns``."""

    reused: bool
    """Whether its connection had carried requests before."""
    sent_ns: int | None = None
    """When the last byte of the request was given to the kernel."""
    end_ns: int = 0
    """When its end arrived, or when the connection was lost."""
    status: int | None = None
    content_type: str = ""
    pieces: list[bytes] = field(default_factory=list)
    """The body as it arrived."""
    arrivals_ns: list[int] = field(default_factory=list)
    """When each of ``pieces`` arrived."""
    on_piece: Callable[[], None] | None = None
    """Called after each piece; it may take itself out."""
    is_complete: bool = False
    is_malformed: bool = False
    """Whether the data is not HTTP."""
    error: str | None = None
    """Why it is not complete."""


@final
class Connection(asyncio.BufferedProtocol):
    """A connection; the parser calls its ``on_`` methods.

    Without TLS it reads its socket itself, see :class:`accelmark.serving.client.clock.WakeSelector`.
    """

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
        """Read the data that arrived."""
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

    def pause_writing(self) -> None:
        """Note that bytes wait to be sent."""

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


@final
class Connections:
    """Connections to one URL; idle connections are used again, the latest first."""

    def __init__(self, url: str, selector: WakeSelector, token: str | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._selector = selector
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
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

    async def post(self, body: bytes, response: Response) -> Response:
        """Send a request and return its response, also where the connection was lost.

        A kept connection that the server closes before it answers is replaced once: closing idle connections is its
        right, and no failure. ``response`` is filled as data arrive, so it is of use after a cancellation.

        Raises:
            NotSentError: no connection could be made.
        """
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        connection = await self._connection(response)
        await self._exchange(connection, request, response)
        if response.reused and response.error and not response.is_malformed and response.status is None:
            response.reused, response.sent_ns, response.error, response.end_ns = False, None, None, 0
            await self._exchange(await self._connect(), request, response)
        return response

    async def _exchange(self, connection: Connection, request: bytes, response: Response) -> None:
        await connection.post(request, response)
        if connection.is_open:
            self._idle.append(connection)

    async def _connection(self, response: Response) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                response.reused = True
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._selector, self._buffer), self._host, self._port, ssl=self._tls
            )
        except (OSError, UnicodeError) as error:  # refused, unknown or impossible host, no certificate
            raise NotSentError(f"cannot connect to {self._host}:{self._port}: {first_line(error)}") from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
