"""The optimizers that settings can name, as MindSpore's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from accelmark.spec.backports import zip_strict
from accelmark.spec.settings.training import OptimizerSettings

OPTIMIZER_CLASSES: Final = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def build_optimizer(model: nn.Cell, settings: OptimizerSettings) -> Any:
    """Return the optimizer over the trainable parameters of ``model``, with PyTorch's formulas.

    SGD and Adam add weight decay to the gradient, AdamW to the step. Gradients are given in the order of its
    ``parameters``.
    """
    trainable = list(model.trainable_params())
    decays = [settings.decay_norm_and_bias or parameter.ndim > 1 for parameter in trainable]
    chosen = {
        decay: [each for each, is_decayed in zip_strict(trainable, decays) if is_decayed == (decay > 0)]
        for decay in ((settings.weight_decay, 0.0) if settings.weight_decay else ())
    } or {0.0: trainable}
    groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in chosen.items() if parameters]
    adam: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.name == "sgd":
        return optim.SGD(groups, settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    if settings.name == "adam":
        return optim.Adam(groups, **adam)
    return optim.AdamW(groups, **adam)


def clipped(gradients: Sequence[Tensor], largest: float) -> tuple[Tensor, ...]:
    """Return the gradients with a global norm of at most ``largest``.

    ``ops.clip_by_global_norm`` of MindSpore 2.10 takes five times as long for small tensors on the CPU.
    """
    squares = [ops.square(gradient).sum() for gradient in gradients]
    norm = ops.sqrt(sum(squares[1:], squares[0]))
    factor = ops.minimum(largest / (norm + 1e-6), Tensor(1.0, ms.float32))
    return tuple(gradient * factor for gradient in gradients)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        ops.assign(group["lr"], Tensor(rate, ms.float32))
