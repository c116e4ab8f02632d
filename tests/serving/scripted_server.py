"""A real HTTP server on loopback whose answers tests write byte by byte."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Handle = Callable[["Peer"], None]


@dataclass
class Peer:
    """The server's end of a connection, with the request that it has to answer."""

    connection: socket.socket
    number: int
    """Of the connection."""
    head: str = ""
    body: dict[str, Any] = field(default_factory=dict)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def begin(self, kind: str = "text/event-stream", status: str = "200 OK") -> None:
        self.send(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

    def chunk(self, data: str) -> None:
        self.send(chunk(data.encode()))

    def event(self, value: object) -> None:
        self.chunk(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n")

    def token(self, text: str, finish_reason: str | None = None) -> None:
        self.event(token(text, finish_reason))

    def end(self) -> None:
        self.event("[DONE]")
        self.send(b"0\r\n\r\n")

    def answer(self, *texts: str) -> None:
        self.begin()
        for text in texts[:-1]:
            self.token(text)
        self.token(texts[-1], "stop")
        self.end()

    def error(self, status: str, body: str = "", kind: str = "application/json") -> None:
        length = len(body.encode())
        self.send(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}".encode())

    def reset(self) -> None:
        """Close in the way of a process that dies."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raise ConnectionAbortedError  # out of the thread that serves, which closes

    def close(self) -> None:
        """Close in the regular way."""
        self.connection.shutdown(socket.SHUT_RDWR)


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def scripted_server(handle: Handle, certificate: Path | None = None) -> Iterator[str]:
    """Serve with a thread for each connection; ``handle`` answers one request. Yields the base URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    connections: list[socket.socket] = []

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(
                target=_serve, args=(connection, len(connections) - 1, context, handle), daemon=True
            ).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"{'https' if context else 'http'}://localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _serve(plain: socket.socket, number: int, context: ssl.SSLContext | None, handle: Handle) -> None:
    with suppress(OSError):  # the client or the test closed it
        connection = context.wrap_socket(plain, server_side=True) if context else plain
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                head = line
                while (line := stream.readline()) not in (b"\r\n", b""):
                    head += line
                text = head.decode()
                length = int(next(each for each in text.splitlines() if each.lower().startswith("content-length"))[15:])
                handle(Peer(connection, number, text, json.loads(stream.read(length))))
