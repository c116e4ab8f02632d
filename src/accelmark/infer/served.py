"""An engine behind a queue: what LoadGen calls its system under test."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol, final

import torch
from torch import Tensor

from accelmark.infer.case import InferBatches
from accelmark.infer.failures import Situation, explained
from accelmark.infer.measure import Forward

_MOST_ITEMS: Final = 1024


class Query(Protocol):
    """One item that LoadGen asks for."""

    @property
    def id(self) -> int:
        """What the answer is matched by."""
        ...

    @property
    def index(self) -> int:
        """Which item."""
        ...


@final
class Items:
    """Up to 1,024 items of the data in memory, for LoadGen to choose among."""

    def __init__(self, batches: InferBatches) -> None:
        held: list[tuple[Tensor, ...]] = []
        count = 0
        for batch in batches:
            held.append(batch.inputs)
            count += batch.num_items
            if count >= _MOST_ITEMS:
                break
        self.inputs = tuple(torch.cat(parts)[:_MOST_ITEMS] for parts in zip(*held, strict=True))

    def __len__(self) -> int:
        return int(self.inputs[0].shape[0])

    def batch(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the items of ``indices`` as one batch."""
        chosen = torch.tensor(indices)
        return [each[chosen] for each in self.inputs]


@final
class Served:
    """A thread that takes what is waiting, up to a batch, through the engine.

    Entering it starts the thread and warms the engine up in it.
    """

    def __init__(
        self,
        forward: Forward,
        items: Items,
        *,
        batch_size: int,
        padded: bool,
        answer: Callable[[Sequence[Query]], None],
        situation: Situation,
    ) -> None:
        """Take the engine.

        Args:
            forward: the engine's forward.
            items: the data.
            batch_size: most items in a call.
            padded: fill a call up to ``batch_size`` by repeating its last item.
            answer: tells LoadGen that queries are done.
            situation: for the message of a failure.
        """
        self.forward = forward
        self.items = items
        self.batch_size = batch_size
        self.padded = padded
        self.answer = answer
        self.situation = situation
        self.failure: BaseException | None = None
        self._waiting: deque[Query] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._warmed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="served", daemon=True)

    def __enter__(self) -> Served:
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
        """Take queries; returns at once."""
        with self._change:
            self._waiting.extend(queries)
            self._change.notify()

    def compute(self, indices: list[int]) -> None:
        """Take one batch through the engine."""
        if self.padded:
            indices = indices + indices[-1:] * (self.batch_size - len(indices))
        self.forward(self.items.batch(indices))

    def raise_failure(self) -> None:
        """Raise what the engine failed with, if it did."""
        if self.failure is not None:
            raise explained(self.failure, self.situation) from self.failure

    def _serve(self) -> None:
        with torch.inference_mode():  # holds for its own thread only
            self._warm_up()
            self._work()

    def _warm_up(self) -> None:
        """Call the engine here, in this thread and mode, so that it prepares for nothing while LoadGen looks on."""
        try:
            self.compute([0] * self.batch_size)
            if not self.padded:
                self.compute([0])
        except Exception as error:  # noqa: BLE001 - told by whoever waits for the warm-up
            self.failure = error
        finally:
            self._warmed.set()

    def _work(self) -> None:
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
                except Exception as error:  # noqa: BLE001 - told after the test; LoadGen waits for every answer
                    self.failure = error
            self.answer(taken)
