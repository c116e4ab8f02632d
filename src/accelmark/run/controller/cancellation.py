"""Requests to stop a run: by signals, and by files from another machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar, final

from accelmark.run.agent.task import STOP_FILES
from accelmark.spec.errors import EXIT_CANCELLED

T = TypeVar("T")
_FILES_S: Final = 1.0


@final
class Cancellation:
    """Counts requests to cancel a run: the first stops it cleanly, the second at once."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = "interrupted"
        self.before_exit: Callable[[], None] = lambda: None
        """Called where the process exits at once, at the third signal."""
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return self.count > 0

    def request(self, reason: str | None = None) -> None:
        """Request a clean stop, or with a second request an immediate one."""
        self.count += 1
        if reason is not None and self.count == 1:
            self.reason = reason
        self._changed.set()

    def handle_signals(self, note: Callable[[str], None], hang_up: Callable[[], str]) -> None:
        """On Ctrl-C and SIGTERM request a clean stop, then one at once, then exit.

        Where the terminal is closed, exit at once after ``hang_up``, which returns what to print; ranks continue.
        """

        def on_signal(name: str) -> None:
            self.request(f"interrupted by {name}")
            if self.count == 1:
                again = "Press Ctrl-C again to stop" if name == "Ctrl-C" else "'accelmark stop --now' stops"
                note(f"Stopping cleanly; results so far are kept. {again} at once.")
            elif self.count > 2:
                self.before_exit()
                os._exit(EXIT_CANCELLED)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, on_signal, "Ctrl-C")
        loop.add_signal_handler(signal.SIGTERM, on_signal, "a request to stop")

        def on_hang_up() -> None:
            with contextlib.suppress(OSError):  # standard error is often the terminal
                os.write(2, f"{hang_up()}\n".encode())
            os._exit(EXIT_CANCELLED)

        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, on_hang_up)

    async def watch_files(self, directory: Path) -> None:
        """Request what files in a run directory ask for, which ``stop`` on another machine creates; without end."""
        while True:
            for urgency, name in enumerate(STOP_FILES, start=1):
                if (directory / name).exists():
                    (directory / name).unlink(missing_ok=True)
                    while self.count < urgency:
                        self.request("was stopped from another machine")
            await asyncio.sleep(_FILES_S)

    async def wait_for_more_than(self, count: int) -> None:
        """Wait until there were more than ``count`` requests."""
        while self.count <= count:
            self._changed.clear()
            await self._changed.wait()

    async def unless_requested(self, work: Awaitable[object]) -> bool:
        """Await ``work``, or cancel it on a request; returns whether it completed."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self.wait_for_more_than(0))
        either: set[asyncio.Future[Any]] = {task, stop}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False


def run_until_signal(body: Coroutine[Any, Any, T]) -> T:
    """Run ``body``; SIGINT and SIGTERM cancel it, so that it returns what it holds of hosts.

    Raises KeyboardInterrupt: it was cancelled by one of them.
    """

    async def cancellable() -> T:
        task = asyncio.ensure_future(body)
        in_main = threading.current_thread() is threading.main_thread()
        # Also in a background process of a script, which starts with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a daemon thread and return its result; unlike with ``to_thread``, exit does not wait for it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return await asyncio.wrap_future(future)
