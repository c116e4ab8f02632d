"""``python -m accelmark.serving.client URL``: a process of the client, with stages and requests on its input."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, Final, final

from accelmark.serving.client.connection import Connections, WakeSelector, allow_files
from accelmark.serving.client.stage import Done, Ready, Request, Sendable, StageOrder, StageRunner, line, raise_failure
from accelmark.spec.model import Spec

API_KEY_VARIABLE: Final = "ACCELMARK_API_KEY"
"""Environment variable with the bearer token."""
_SWITCH_S: Final = 0.0005
"""Longest time for which the event loop delays LoadGen's threads, and the other way round."""


class _Output(asyncio.BaseProtocol):
    """Notes when everything was written."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


@final
class _Client:
    """Carries out one stage after the other."""

    def __init__(self, url: str, selector: WakeSelector) -> None:
        self._connections = Connections(url, selector, os.environ.get(API_KEY_VARIABLE))
        self._stage: StageRunner | None = None
        self._running: asyncio.Task[Done] | None = None
        self._input: asyncio.StreamReader
        self._output: asyncio.WriteTransport

    async def run(self) -> None:
        """Carry out stages until the input ends or SIGTERM arrives; then give up the requests in progress."""
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
    allow_files()
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
