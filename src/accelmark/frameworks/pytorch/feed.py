"""Copy batches to the device, pinned and prefetched by a thread where the device is not the CPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar, final

import torch

from accelmark.frameworks.pytorch.case import Batch

T = TypeVar("T")
_POLL_S: Final = 0.2


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """Return a function that copies a batch to ``device`` without waiting, images optionally in channels-last order."""
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(batch: Batch) -> Batch:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if not channels_last:
            return moved
        return {
            name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
            for name, tensor in moved.items()
        }

    return move


def pinned(batch: Batch) -> Batch:
    """Return the batch in page-locked memory, from which copies are asynchronous."""
    return {name: tensor if tensor.device.type != "cpu" else tensor.pin_memory() for name, tensor in batch.items()}


def steps_of(batches: Iterator[Batch], accumulation: int, move: Callable[[Batch], Batch]) -> Iterator[list[Batch]]:
    """Group moved batches by optimizer step; an incomplete last group is dropped."""
    group: list[Batch] = []
    for batch in batches:
        group.append(move(batch))
        if len(group) == accumulation:
            yield group
            group = []


def skipped(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Drop the first ``count`` batches, which an earlier process trained."""
    for _ in range(count):
        next(batches, None)
    return batches


@final
class Ahead(Iterator[T]):
    """Runs an iterator in a thread, up to ``depth`` items ahead; its errors are raised in the consumer."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="batches", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item = self._queue.get()
        if isinstance(item, tuple):
            return item[0]
        self._queue.put(item)
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop the thread, and discard its remaining items."""
        self._closed.set()
        self._thread.join()

    def _run(self, items: Iterator[T]) -> None:
        last: BaseException | None = None
        try:
            for item in items:
                if not self._put((item,)):
                    return
        except Exception as error:  # noqa: BLE001 - raised again by the consumer
            last = error
        self._put(last)

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
