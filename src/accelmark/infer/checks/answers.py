"""Compare an engine's answers with the framework's on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from accelmark.spec.log.inference import AnswerCheck
from accelmark.tasks.metrics import IGNORED

_FOLLOWED: Final = (128, 1024)
"""Smallest and largest number of items for which the framework also answers the unchanged input."""
_FOLLOWED_ERROR: Final = 0.05
"""Standard error of the sensitivity that is small enough between the two."""
_TINY: Final = 1e-12


@final
class Answers:
    """The comparison of all answers so far.

    ``iterative``: integers are the choices of an answer's steps, which count as ranked values; the answers of the
    framework follow from the choices before each step (``IterativeModel``).
    """

    def __init__(self, *, iterative: bool = False) -> None:
        self.iterative = iterative
        self.errors: list[Tensor] = []
        self.agreeing = 0
        self.ranked = 0
        self.followed = 0
        self._moves: list[Tensor] = []
        """Rows of two numbers: how far answers moved with their inputs, and how far the framework's did."""

    @property
    def needs_unchanged(self) -> bool:
        """Whether answers for unchanged inputs are still needed."""
        fewest, most = _FOLLOWED
        return self.followed < fewest or (self.followed < most and not self._sensitivity()[1] <= _FOLLOWED_ERROR)

    def add(self, found: Sequence[Tensor], expected: Sequence[Tensor], unchanged: Sequence[Tensor] = ()) -> None:
        """Compare the outputs of some items; ``unchanged`` are the framework's for inputs before their perturbation."""
        items = expected[0].shape[0]
        worst = torch.zeros(items)
        for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            if self.iterative and not wanted.is_floating_point():
                counted = wanted != IGNORED
                self.agreeing += int((counted & (actual == wanted)).sum())
                self.ranked += int(counted.sum())
                continue
            if not wanted.is_floating_point():
                worst = worst.maximum((actual != wanted).reshape(items, -1).any(1).float())
                continue
            one, two = actual.float().reshape(items, -1), wanted.float().reshape(items, -1)
            worst = worst.maximum((one - two).norm(dim=1) / two.norm(dim=1).clamp_min(_TINY))
            if index == 0 and wanted.ndim > 1 and wanted.shape[-1] > 1:
                self.agreeing += int((actual.argmax(-1) == wanted.argmax(-1)).sum())
                self.ranked += wanted[..., 0].numel()
            if unchanged:
                before = unchanged[index].float().reshape(items, -1)
                moved, expected_move = (one - before) * (two - before), (two - before).square()
                self._moves.append(torch.stack([moved.sum(1), expected_move.sum(1)], 1).double())
        self.followed += items if unchanged else 0
        self.errors.append(worst.nan_to_num(math.inf, math.inf))

    def _sensitivity(self) -> tuple[float, float]:
        """Return the ratio of the sums of both columns of moves, and its standard error; NaN where nothing moved."""
        moved, expected = torch.cat(self._moves).unbind(1) if self._moves else (torch.zeros(1), torch.zeros(1))
        total = float(expected.sum())
        if not total > 0:
            return math.nan, math.nan
        ratio = float(moved.sum()) / total
        return ratio, float((moved - ratio * expected).norm()) / total

    def result(self, **others: Any) -> AnswerCheck:
        """Return the comparison as an event."""
        errors = torch.cat(self.errors) if self.errors else torch.zeros(0)
        return AnswerCheck(
            num_items=len(errors),
            median_error=_finite(errors.median().item()) if len(errors) else None,
            worst_error=_finite(errors.max().item()) if len(errors) else None,
            top1_agreement=self.agreeing / self.ranked if self.ranked else None,
            sensitivity=_finite(self._sensitivity()[0]),
            **others,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
