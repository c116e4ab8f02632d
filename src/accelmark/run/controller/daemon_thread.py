"""Blocking work beside the event loop that a person who is in a hurry does not have to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_background(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread that does not hold up the end of the process when its result is no longer wanted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def tell(set_it: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it)

    def body() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  carried to the one who waits
            failure = error
            tell(lambda: future.set_exception(failure))
        else:
            tell(lambda: future.set_result(result))

    threading.Thread(target=body, daemon=True).start()
    return await future
