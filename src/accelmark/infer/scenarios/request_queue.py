"""A request queue in front of an engine, with dynamic batching: LoadGen's system under test."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar, final

from torch import Tensor

from accelmark.infer.failures import Context, classify
from accelmark.serving.loadgen.mlperf import Query

T = TypeVar("T")
Compute = Callable[[Sequence[int]], Sequence[Tensor]]
"""Indices of items to outputs, which are valid until the next call."""
Look = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Gets the indices and outputs of a call."""


class Overlapped(Protocol):
    """An engine that computes several calls at the same time, each with a slot for its answers."""

    @property
    def concurrency(self) -> int:
        """Number of slots."""
        ...

    def start(self, slot: int, indices: Sequence[int]) -> None:
        """Start a call of items."""
        ...

    def ended(self) -> int:
        """Wait until a call has ended; return its slot."""
        ...

    def answers_of(self, slot: int, num_items: int) -> Sequence[Tensor]:
        """Return the outputs in a slot."""
        ...


@final
class RequestQueue:
    """A thread that runs the waiting queries through the engine, up to a batch at a time.

    With ``overlapped`` calls are computed at the same time, and a second thread completes them.

    As a context manager: entering it starts the thread, which warms the engine up; leaving it drains the queue.
    """

    def __init__(
        self, compute: Compute, look: Look, *, batch_size: int, padded: bool, context: Context,
        overlapped: Overlapped | None = None,
    ) -> None:  # fmt: skip
        """Create the queue; ``complete`` has to be set before queries are issued.

        A call has up to ``batch_size`` items; ``padded`` calls repeat their last item up to ``batch_size``.
        """
        self.compute = compute
        self.look = look
        self.batch_size = batch_size
        self.padded = padded
        self.overlapped = overlapped
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

    def call(self, indices: list[int]) -> Sequence[Tensor]:
        """Run one batch through the engine."""
        return self.compute(self._full(indices))

    def _full(self, indices: list[int]) -> list[int]:
        return indices + indices[-1:] * (self.batch_size - len(indices)) if self.padded else indices

    def raise_failure(self) -> None:
        """Raise the engine's error, if it failed."""
        if self.failure is not None:
            raise classify(self.failure, self.context) from self.failure

    def _run(self) -> None:
        self._warm_up()
        if self.overlapped is None:
            self._process()
        else:
            self._process_overlapped(self.overlapped)

    def _warm_up(self) -> None:
        """Call the engine before LoadGen measures."""
        try:
            self.call([0] * self.batch_size)
            if not self.padded:
                self.call([0])
        except Exception as error:  # noqa: BLE001 - raised in __enter__
            self.failure = error
        finally:
            self._warmed.set()

    def _take(self) -> list[Query]:
        """Wait for queries; return up to a batch of them, none after the end."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    def _process_overlapped(self, engine: Overlapped) -> None:
        free: SimpleQueue[int] = SimpleQueue()
        for slot in range(engine.concurrency):
            free.put(slot)
        running: dict[int, list[Query]] = {}
        started: SimpleQueue[bool] = SimpleQueue()

        def collect() -> None:
            while started.get():
                ended = self._attempt(engine.ended)
                slot = next(iter(running)) if ended is None else ended  # after a failure every query is completed
                taken = running.pop(slot)
                if self.complete is not None:
                    self.complete(taken)
                if ended is not None:
                    indices = [query.index for query in taken]
                    self.look(indices, engine.answers_of(slot, len(self._full(indices))))
                free.put(slot)

        collector = threading.Thread(target=collect, name="answers", daemon=True)
        collector.start()
        while taken := self._take():
            slot = free.get()
            running[slot] = taken
            self._attempt(partial(engine.start, slot, self._full([query.index for query in taken])))
            started.put(True)
        started.put(False)
        collector.join()

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Return what ``action`` returns, None if it or an earlier one failed: LoadGen waits for every response."""
        if self.failure is None:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - raised after the test
                self.failure = error
        return None

    def _process(self) -> None:
        while taken := self._take():
            indices = [query.index for query in taken]
            outputs = self._attempt(partial(self.call, indices))
            if self.complete is not None:
                self.complete(taken)
            if outputs:
                self.look(indices, outputs)
