"""Feed batches to the device: prefetched by a thread and pinned where it is not the CPU, or synthetic."""

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


@final
class CopyStream:
    """A stream on which batches are made and copied to a device while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def send(self, batches: Iterator[Batch], move: Callable[[Batch], Batch]) -> Iterator[tuple[Batch, torch.Event]]:
        """Yield moved batches, each with the event of its arrival; runs in a thread of its own."""
        # A data set on the device may still be on its way there.
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            for batch in batches:
                yield move(batch), self._stream.record_event()

    def receive(self, sent: Iterator[tuple[Batch, torch.Event]]) -> Iterator[Batch]:
        """Yield batches that the device may use: its current stream waits for their arrival."""
        for batch, arrived in sent:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_event(arrived)
            for tensor in batch.values():
                tensor.record_stream(current)
            yield batch


def steps_of(batches: Iterator[Batch], accumulation: int) -> Iterator[list[Batch]]:
    """Group batches by optimizer step; an incomplete last group is dropped."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == accumulation:
            yield group
            group = []


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


def on_meta(batch: Batch) -> Batch:
    """Return a batch of the same shapes and types without data."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
