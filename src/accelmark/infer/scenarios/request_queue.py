"""A request queue in front of an engine, with dynamic batching: LoadGen's system under test."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol, final

from torch import Tensor

from accelmark.infer.failures import Context, classify

Compute = Callable[[Sequence[int]], Sequence[Tensor]]
"""Indices of items to outputs, which are valid until the next call."""
Look = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Gets the indices and outputs of a call."""


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
class RequestQueue:
    """A thread that runs the waiting queries through the engine, up to a batch at a time.

    As a context manager: entering it starts the thread, which warms the engine up; leaving it drains the queue.
    """

    def __init__(self, compute: Compute, look: Look, *, batch_size: int, padded: bool, context: Context) -> None:
        """Create the queue; ``complete`` has to be set before queries are issued.

        A call has up to ``batch_size`` items; ``padded`` calls repeat their last item up to ``batch_size``.
        """
        self.compute = compute
        self.look = look
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

    def call(self, indices: list[int]) -> Sequence[Tensor]:
        """Run one batch through the engine."""
        return self.compute(indices + indices[-1:] * (self.batch_size - len(indices)) if self.padded else indices)

    def raise_failure(self) -> None:
        """Raise the engine's error, if it failed."""
        if self.failure is not None:
            raise classify(self.failure, self.context) from self.failure

    def _run(self) -> None:
        self._warm_up()
        self._process()

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
            indices = [query.index for query in taken]
            outputs: Sequence[Tensor] = ()
            if self.failure is None:
                try:
                    outputs = self.call(indices)
                except Exception as error:  # noqa: BLE001 - raised after the test; LoadGen waits for every response
                    self.failure = error
            if self.complete is not None:
                self.complete(taken)
            if outputs:
                self.look(indices, outputs)
