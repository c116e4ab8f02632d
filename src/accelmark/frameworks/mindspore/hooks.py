"""Hooks that a vendor may override in MindSpore, and the optimizers that settings can name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.experimental import optim

from accelmark.spec.backports import zip_strict
from accelmark.train.hooks import ArrayHooks

ALLOWED_HOOKS: Final = ("convert_model", "create_optimizer", "train_step")


class Lamb(optim.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2) with bias correction; MindSpore's has another formula."""

    def __init__(self, groups: Sequence[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps
        self.means = self.parameters.clone(prefix="mean", init="zeros")
        self.squares = self.parameters.clone(prefix="square", init="zeros")
        self.count = Parameter(Tensor(0.0, ms.float32), name="count")

    def construct(self, gradients: Sequence[Tensor]) -> None:
        """Take one step."""
        count = ops.assign_add(self.count, Tensor(1.0, ms.float32))
        corrections = [1 - ops.pow(Tensor(beta, ms.float32), count) for beta in self.betas]
        rows = iter(zip_strict(self.parameters, gradients, self.means, self.squares))
        for group in self.param_groups:
            for _, (parameter, gradient, mean, square) in zip(group["params"], rows):
                new_mean = ops.assign(mean, self.betas[0] * mean + (1 - self.betas[0]) * gradient)
                new_square = ops.assign(square, self.betas[1] * square + (1 - self.betas[1]) * ops.square(gradient))
                step = new_mean / corrections[0] / (ops.sqrt(new_square / corrections[1]) + self.eps)
                step = step + group["weight_decay"] * parameter
                norm, step_norm = (ops.sqrt(ops.square(tensor).sum()) for tensor in (parameter, step))
                ratio = ops.where(ops.logical_and(norm > 0, step_norm > 0), norm / step_norm, ops.ones_like(norm))
                ops.assign_sub(parameter, group["lr"] * ratio * step)


def clipped(gradients: Sequence[Tensor], largest: float) -> tuple[Tensor, ...]:
    """Return the gradients with a global norm of at most ``largest``; ``ops.clip_by_global_norm`` is slow on CPUs."""
    squares = [ops.square(gradient).sum() for gradient in gradients]
    norm = ops.sqrt(sum(squares[1:], squares[0]))
    factor = ops.minimum(largest / (norm + 1e-6), Tensor(1.0, ms.float32))
    return tuple(gradient * factor for gradient in gradients)


class Hooks(ArrayHooks):
    """The default hooks, which a vendor subclasses as ``Extern``.

    ``train_step`` gets the backend, the batches of a step on the device and the learning rate, and returns the loss.
    """

    def create_optimizer(self, model: Any) -> Any:
        """Return the optimizer over the trainable parameters of ``model``, with PyTorch's formulas."""
        settings = self.settings.optimizer
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
        return (Lamb if settings.name == "lamb" else optim.AdamW)(groups, **adam)
