"""A minimal loop in PaddlePaddle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

from accelmark.frameworks.paddle.backend import PaddleBackend
from benchmarks.bare_loops import SCHEDULED_STEPS


def bare_loop(backend: PaddleBackend, batches: Iterator[Any]) -> None:
    """Train without log and clock; the optimizer clips."""
    case, model, optimizer = backend.case, backend._model, backend._optimizer
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(backend.settings.optimizer.lr, SCHEDULED_STEPS)
    for batch in batches:
        loss = case.loss(model, {name: paddle.to_tensor(array) for name, array in batch.items()})
        loss.backward()
        optimizer.set_lr(schedule.get_lr())
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        schedule.step()
