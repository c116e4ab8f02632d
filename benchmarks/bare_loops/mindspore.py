"""A minimal loop in MindSpore: loss and gradients are one graph.

The learning rate is computed here: a step of ``lr_scheduler.CosineAnnealingLR`` takes as long as half a step of a small
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor

from accelmark.frameworks.mindspore.backend import MindSporeBackend
from accelmark.frameworks.mindspore.hooks import clipped
from benchmarks.bare_loops import SCHEDULED_STEPS


def bare_loop(backend: MindSporeBackend, batches: Iterator[Any]) -> None:
    """Train without log and clock."""
    case, model, optimizer = backend.case, backend._model, backend._optimizer
    clip = backend.settings.gradient_clip_norm
    peak = backend.settings.optimizer.lr

    def compiled(names: tuple[str, ...]) -> Any:
        def loss_of(*tensors: Tensor) -> Tensor:
            return case.loss(model, dict(zip(names, tensors, strict=True)))

        gradient = ms.value_and_grad(loss_of, None, optimizer.parameters)
        return ms.jit(lambda *tensors: gradient(*tensors), capture_mode="bytecode")

    graph: Any = None
    for step, batch in enumerate(batches):
        graph = graph or compiled(tuple(batch))
        _, gradients = graph(*(Tensor(array) for array in batch.values()))
        if clip is not None:
            gradients = clipped(gradients, clip)
        rate = Tensor(peak * (1 + math.cos(math.pi * step / SCHEDULED_STEPS)) / 2, ms.float32)
        for group in optimizer.param_groups:
            ms.ops.assign(group["lr"], rate)
        optimizer(gradients)
