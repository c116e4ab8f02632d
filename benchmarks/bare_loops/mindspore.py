"""A minimal loop in MindSpore: loss and gradients are one graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.experimental.optim import lr_scheduler

from accelmark.frameworks.mindspore.backend import MindSporeBackend
from benchmarks.bare_loops import SCHEDULED_STEPS


def bare_loop(backend: MindSporeBackend, batches: Iterator[Any]) -> None:
    """Train without log and clock."""
    case, model, optimizer = backend.case, backend._model, backend._optimizer
    clip = backend.settings.gradient_clip_norm
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULED_STEPS)

    def compiled(names: tuple[str, ...]) -> Any:
        def loss_of(*tensors: Tensor) -> Tensor:
            return case.loss(model, dict(zip(names, tensors, strict=True)))

        gradient = ms.value_and_grad(loss_of, None, optimizer.parameters)
        return ms.jit(lambda *tensors: gradient(*tensors), capture_mode="bytecode")

    graph: Any = None
    for batch in batches:
        graph = graph or compiled(tuple(batch))
        _, gradients = graph(*(Tensor(array) for array in batch.values()))
        if clip is not None:
            gradients = ops.clip_by_global_norm(gradients, clip)
        optimizer(gradients)
        schedule.step()
