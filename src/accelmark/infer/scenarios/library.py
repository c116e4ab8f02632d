"""The items that LoadGen requests, in memory shared with the engine's process, and the checks of their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from accelmark.infer.case import InferBatch
from accelmark.infer.checks.answers import Answers
from accelmark.infer.checks.checked_pass import CheckedPass
from accelmark.infer.checks.repeat_check import CALLS, repeat_check
from accelmark.infer.process.memory import Slots
from accelmark.spec.log.inference import AnswerCheck, RepeatCheck

_MAX_ITEMS: Final = 1024
_MAX_BYTES: Final = 256 * 2**20
_CHECKS: Final = 12
_SHARE: Final = 0.05
"""Share of the calls in performance mode whose answers are compared."""


@final
class Library:
    """Up to 1,024 perturbed items in the first slot, followed by room for items that are new to the engine."""

    def __init__(self, checked: CheckedPass, largest_call: int) -> None:
        self.checked = checked
        self.process = checked.process
        unchanged: list[tuple[Tensor, ...]] = []
        inputs: list[tuple[Tensor, ...]] = []
        count = size = 0
        for batch in checked.batches:
            unchanged.append(batch.inputs)
            inputs.append(checked.case.perturbed(batch, checked.generator))
            count += batch.num_items
            size += sum(each.nbytes for each in batch.inputs)
            if count >= _MAX_ITEMS or size >= _MAX_BYTES:
                break
        self.unchanged = [torch.cat(parts)[:_MAX_ITEMS] for parts in zip(*unchanged, strict=True)]
        self.inputs = [torch.cat(parts)[:_MAX_ITEMS] for parts in zip(*inputs, strict=True)]
        self.largest_call = largest_call
        room = [torch.zeros(largest_call, *each.shape[1:], dtype=each.dtype) for each in self.inputs]
        whole = [torch.cat([each, more]) for each, more in zip(self.inputs, room, strict=True)]
        warm = min(len(self), checked.settings.batch_size)
        self.process.arrange(Slots.like(whole, len(whole[0]), 1), (0, warm), whole)
        self.process.expect(self.process.answers, largest_call, 1, self.process.concurrency)
        self.expected: list[Tensor] = []
        if checked.reference is not None and not checked.iterative:
            parts = [
                checked.reference([each[first : first + 64] for each in self.inputs])
                for first in range(0, len(self), 64)
            ]
            self.expected = [torch.cat(outputs) for outputs in zip(*parts, strict=True)]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def answers(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the framework's answers to items, which ``outputs`` of the engine are compared with."""
        if self.expected:
            return [each[indices] for each in self.expected]
        assert self.checked.reference is not None  # noqa: S101 - nothing is kept without it
        return self.checked.reference([*(each[indices] for each in self.inputs), *outputs])

    def repeat_check(self, size: int) -> RepeatCheck:
        """Compare the time of items that are new to the engine with that of the library's, which it computed often."""
        size = min(size, len(self))
        new = range(len(self), len(self) + size)
        calls_ms: list[list[float]] = []
        for _ in range(_CHECKS):
            first = self.checked.chance.randrange(len(self) - size + 1)
            known = range(first, first + size)
            batch = InferBatch(tuple(each[first : first + size] for each in self.unchanged), None)
            fresh = self.checked.case.perturbed(batch, self.checked.generator)
            kinds = [new, *(known if call % 2 else new for call in range(1, CALLS))]
            calls_ms.append([self._timed_ms(rows, known, fresh) for rows in kinds])
        return repeat_check(calls_ms)

    def _timed_ms(self, rows: range, known: range, fresh: Sequence[Tensor]) -> float:
        """Return the duration of a call, after a call of other items and with all inputs copied anew."""
        views = self.process.slots.views(self.process.shared, 0, len(self) + self.largest_call)
        self.process.pick([len(self) - 1] * len(rows))
        for view, own, other in zip(views, self.inputs, fresh, strict=True):
            view[known.start : known.stop] = own[known.start : known.stop]
            view[len(self) : len(self) + len(rows)] = other
        indices = list(rows)
        began = time.perf_counter()
        self.process.pick(indices)
        return (time.perf_counter() - began) * 1000


@final
class AnswerSamples:
    """Answers of a random share of the calls and of the first call of each size, for comparison after the test."""

    def __init__(self, library: Library, share: float = _SHARE) -> None:
        self.library = library
        self.share = share
        self.held: list[tuple[list[int], list[Tensor]]] = []
        self.held_bytes = 0
        self.sizes: set[int] = set()
        self.num_not_compared = 0

    def take(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """Keep the answers of a call, if it is in the sample; padding is left out."""
        size = len(indices)
        chosen = size not in self.sizes or self.library.checked.chance.random() < self.share
        if self.library.checked.reference is None or not chosen or self.held_bytes > _MAX_BYTES:
            self.num_not_compared += size
            return
        self.sizes.add(size)
        kept = [each[:size].clone() for each in outputs]
        self.held_bytes += sum(each.nbytes for each in kept)
        self.held.append((list(indices), kept))

    def compared(self) -> AnswerCheck | None:
        """Compare what is kept with the framework's answers; None without those."""
        if self.library.checked.reference is None:
            return None
        answers = Answers(iterative=self.library.checked.iterative)
        for indices, outputs in self.held:
            answers.add(outputs, self.library.answers(indices, outputs))
        return answers.result(num_not_compared=self.num_not_compared)
