"""A request queue in front of an engine, with dynamic batching: LoadGen's system under test."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol, final

import torch
from torch import Tensor

from accelmark.infer.case import InferBatches
from accelmark.infer.failures import Context, classify
from accelmark.infer.measure import Forward

_MAX_ITEMS: Final = 1024


class Query(Protocol):
    """One sample that LoadGen requests."""

    @property
    def id(self) -> int:
        """Id of the response."""
        ...

    @property
    def index(self) -> int:
        """Index of the item."""
        ...


@final
class SampleLibrary:
    """Up to 1,024 items of the data in memory, from which LoadGen requests samples."""

    def __init__(self, batches: InferBatches) -> None:
        held: list[tuple[Tensor, ...]] = []
        count = 0
        for batch in batches:
            held.append(batch.inputs)
            count += batch.num_items
            if count >= _MAX_ITEMS:
                break
        self.inputs = tuple(torch.cat(parts)[:_MAX_ITEMS] for parts in zip(*held, strict=True))

    def __len__(self) -> int:
        return int(self.inputs[0].shape[0])

    def batch(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the items of ``indices`` as one batch."""
        chosen = torch.tensor(indices)
        return [each[chosen] for each in self.inputs]


@final
class RequestQueue:
    """A thread that runs the waiting queries through the engine, up to a batch at a time.

    As a context manager: entering it starts the thread, which warms the engine up; leaving it drains the queue.
    """

    def __init__(
        self, forward: Forward, items: SampleLibrary, *, batch_size: int, padded: bool, context: Context
    ) -> None:
        """Create the queue; ``complete`` has to be set before queries are issued.

        A call has up to ``batch_size`` items; ``padded`` calls repeat their last item up to ``batch_size``.
        """
        self.forward = forward
        self.items = items
        self.batch_size = batch_size
        self.padded = padded
        self.complete: Callable[[Sequence[Query]], None] | None = None
        """Called with completed queries."""
        self.context = context
        self.failure: BaseException | None = None
        self._waiting: deque[Query] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._warmed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)

    def __enter__(self) -> RequestQueue:
        self._thread.start()
        self._warmed.wait()
        if self.failure is not None:
            self.__exit__()
            self.raise_failure()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def issue(self, queries: Sequence[Query]) -> None:
        """Add queries; returns at once."""
        with self._change:
            self._waiting.extend(queries)
            self._change.notify()

    def compute(self, indices: list[int]) -> None:
        """Run one batch through the engine."""
        if self.padded:
            indices = indices + indices[-1:] * (self.batch_size - len(indices))
        self.forward(self.items.batch(indices))

    def raise_failure(self) -> None:
        """Raise the engine's error, if it failed."""
        if self.failure is not None:
            raise classify(self.failure, self.context) from self.failure

    def _run(self) -> None:
        with torch.inference_mode():  # applies to this thread only
            self._warm_up()
            self._process()

    def _warm_up(self) -> None:
        """Call the engine in this thread and mode before LoadGen measures."""
        try:
            self.compute([0] * self.batch_size)
            if not self.padded:
                self.compute([0])
        except Exception as error:  # noqa: BLE001 - raised in __enter__
            self.failure = error
        finally:
            self._warmed.set()

    def _process(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._closed:
                    self._change.wait()
                if not self._waiting:
                    return
                taken = list(islice(self._waiting, self.batch_size))
                for _ in taken:
                    self._waiting.popleft()
            if self.failure is None:
                try:
                    self.compute([query.index for query in taken])
                except Exception as error:  # noqa: BLE001 - raised after the test; LoadGen waits for every response
                    self.failure = error
            if self.complete is not None:
                self.complete(taken)
