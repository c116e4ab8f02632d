"""Run a blocking call in a daemon thread that does not delay shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a daemon thread and return its result; unlike with ``to_thread``, exit does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def deliver(set_it: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it)

    def body() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  carried to the one who waits
            failure = error
            deliver(lambda: future.set_exception(failure))
        else:
            deliver(lambda: future.set_result(result))

    threading.Thread(target=body, daemon=True).start()
    return await future
