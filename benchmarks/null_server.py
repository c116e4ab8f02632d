"""A server without a model: it streams tokens at given times, with as little work as Python allows.

``python -m benchmarks.null_server --ttft-ms 5 --itl-ms 2 --jitter 0.2`` prints its port. A request for N tokens
(``max_tokens``) is answered with N events, whose bytes are made once. A timer for each request writes them; with
``--step-ms`` all requests in progress get a token at every step, as from an engine with continuous batching. With
``--stamps FILE`` it writes a line of JSON for every request at its end: when the request arrived and when each event
was given to the kernel, on the monotonic clock, which clients on the same machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import time
from pathlib import Path
from typing import IO, Final

import httptools

from accelmark.serving.client.connection import WakeSelector

HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT: Final = (
    '{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    '"model":"null","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],'
    '"usage":null}'
)
"""As vLLM writes it: 218 bytes."""
_MODELS: Final = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 26\r\n\r\n{"data": [{"id": "null"}]}'
)
_MAX_TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')


def chunk(data: str) -> bytes:
    """Return an event as a chunk of HTTP."""
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


TOKEN: Final = chunk(_EVENT)


def last(num_tokens: int) -> bytes:
    """Return the last token, ``usage`` and the end."""
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    end = _EVENT.replace('"finish_reason":null', '"finish_reason":"length"')
    return chunk(end) + chunk(json.dumps({"choices": [], "usage": usage})) + chunk("[DONE]") + b"0\r\n\r\n"


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, options: argparse.Namespace, stamps: IO[str] | None, steps: dict[Server, None]) -> None:
        self._steps = steps
        self._options = options
        self._stamps = stamps
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._body = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":  # health, models
            self._transport.write(_MODELS)
            return
        found = _MAX_TOKENS.search(self._body)
        self._num_tokens = int(found[1]) if found else 16
        self._last_body = self._body
        self._body = b""
        self._num_sent = 0
        self._arrived_ns = time.monotonic_ns()
        self._sent_ns: list[int] = []
        if self._options.step_ms:
            self._steps[self] = None
            return
        self._due_s = self._loop.time() + self._delay_s(self._options.ttft_ms)
        self._timer = self._loop.call_at(self._due_s, self._send)

    def _delay_s(self, mean_ms: float) -> float:
        jitter = self._options.jitter
        return mean_ms / 1e3 * (random.uniform(1 - jitter, 1 + jitter) if jitter else 1.0)

    def _send(self) -> None:
        """Write the next token, and set the timer of the one after it."""
        if self.send():
            self._due_s += self._delay_s(self._options.itl_ms)
            self._timer = self._loop.call_at(self._due_s, self._send)

    def send(self) -> bool:
        """Write the next token; return whether there is another."""
        self._num_sent += 1
        is_last = self._num_sent >= self._num_tokens
        data = last(self._num_tokens) if is_last else TOKEN
        self._sent_ns.append(time.monotonic_ns())
        self._transport.write(HEAD + data if self._num_sent == 1 else data)
        if is_last and self._stamps is not None:
            number = int(re.findall(rb"#(\d+)#", self._last_body)[0])
            stamps = {"number": number, "arrived_ns": self._arrived_ns, "sent_ns": self._sent_ns}
            self._stamps.write(json.dumps(stamps) + "\n")
            self._stamps.flush()
        return not is_last


async def serve(options: argparse.Namespace) -> None:
    """Listen, print the port, and go on until a signal."""
    stamps = options.stamps.open("a", encoding="utf-8") if options.stamps else None
    loop = asyncio.get_running_loop()
    steps: dict[Server, None] = {}
    server = await loop.create_server(lambda: Server(options, stamps, steps), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    due_s = loop.time()
    while True:
        due_s += (options.step_ms or 1e3) / 1e3
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        for each in list(steps):
            if not each.send():
                steps.pop(each, None)


def allow_files() -> None:
    """Raise the limit of open files, each connection being one, to the one allowed, as ranks do."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--jitter", type=float, default=0.0, help="greatest relative deviation of each delay")
    parser.add_argument("--step-ms", type=float, help="of an engine; no other delay applies")
    parser.add_argument("--stamps", type=Path)
    allow_files()
    loop = asyncio.SelectorEventLoop(WakeSelector())
    loop.run_until_complete(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
