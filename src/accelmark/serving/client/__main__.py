"""``python -m accelmark.serving.client URL``: a process of the client, with messages and requests on its input."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, Final

from accelmark.serving.client.clock import WakeSelector, allow_files, new_loop
from accelmark.serving.client.connection import Connections
from accelmark.serving.client.messages import TO_CLIENT, Begin, Close, Open, Ready, Request, line
from accelmark.serving.client.stage import StageRunner, raise_failure
from accelmark.spec.model import Spec

API_KEY_VARIABLE: Final = "ACCELMARK_API_KEY"
"""Environment variable with the bearer token."""
_LINE_BYTES: Final = 1 << 20


class _Output(asyncio.BaseProtocol):
    """Notes when everything was written."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


class _Client:
    """Executes the messages of the parent."""

    def __init__(self, url: str, selector: WakeSelector) -> None:
        self._connections = Connections(url, selector, os.environ.get(API_KEY_VARIABLE))
        self._stage: StageRunner | None = None
        self._running: asyncio.Task[None] | None = None
        self._output: asyncio.WriteTransport

    async def run(self) -> None:
        """Take messages until the input ends or SIGTERM arrives; then give up what is in progress."""
        loop = asyncio.get_running_loop()
        messages = asyncio.StreamReader(limit=_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(messages), sys.stdin)
        self._output, output = await loop.connect_write_pipe(_Output, sys.stdout)
        taking = loop.create_task(self._take(messages))
        loop.add_signal_handler(signal.SIGTERM, taking.cancel)
        await asyncio.wait((taking,))
        if self._stage is not None and self._running is not None:
            self._stage.cancel()
            await self._running
        self._connections.close()
        self._output.close()
        await output.closed
        if not taking.cancelled():
            taking.result()

    async def _take(self, messages: asyncio.StreamReader) -> None:
        while text := await messages.readline():
            message = TO_CLIENT.validate_json(text)
            if isinstance(message, Open):
                if self._running is not None:
                    await self._running
                self._stage = StageRunner(message, self._connections, self._send)
                continue
            if isinstance(message, Ready):
                self._send(message)
                continue
            if self._stage is None:
                raise RuntimeError("a stage is opened before its requests")
            if isinstance(message, Request):
                self._stage.add(message, await messages.readexactly(message.num_bytes))
            elif isinstance(message, Begin):
                self._running = asyncio.create_task(self._run(self._stage, message.mono_ns))
                self._running.add_done_callback(raise_failure)
            elif isinstance(message, Close):
                self._stage.close()

    async def _run(self, stage: StageRunner, begin_ns: int) -> None:
        self._send(await stage.run(begin_ns))

    def _send(self, message: Spec) -> None:
        self._output.write(line(message))


def main() -> None:
    """Run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    allow_files()
    selector = WakeSelector()
    loop = new_loop(selector)
    loop.set_exception_handler(_fail)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_Client(sys.argv[1], selector).run())


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process after an error that nothing expects: the parent reports it."""
    loop.default_exception_handler(context)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
