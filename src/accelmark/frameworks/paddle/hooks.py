"""Hooks that a vendor may override in PaddlePaddle, and the optimizers that settings can name, as Paddle's."""

from __future__ import annotations

from typing import Any, Final

import paddle
from paddle import nn

from accelmark.train.hooks import ArrayHooks

ALLOWED_HOOKS: Final = ("convert_model", "create_optimizer", "train_step")


class Hooks(ArrayHooks):
    """The default hooks, which a vendor subclasses as ``Extern``.

    ``train_step`` gets the backend, the batches of a step on the device and the learning rate, and returns the loss.
    """

    def create_optimizer(self, model: Any) -> Any:
        """Return the optimizer over the trainable parameters of ``model``, with PyTorch's formulas."""
        settings, norm = self.settings.optimizer, self.settings.gradient_clip_norm
        trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        undecayed = {each.name for each in trainable if each.ndim <= 1 and not settings.decay_norm_and_bias}
        clip = nn.ClipGradByGlobalNorm(norm) if norm is not None else None
        decay = settings.weight_decay
        adam = {"beta1": settings.beta1, "beta2": settings.beta2, "epsilon": settings.eps}
        options: dict[str, Any] = {"learning_rate": settings.lr, "grad_clip": clip}
        if settings.name == "adamw":
            decays = {"weight_decay": decay, "apply_decay_param_fun": lambda name: name not in undecayed}
            return paddle.optimizer.AdamW(parameters=trainable, **decays, **adam, **options)
        if settings.name == "lamb":
            decays = {"lamb_weight_decay": decay, "exclude_from_weight_decay_fn": lambda each: each.name in undecayed}
            return paddle.optimizer.Lamb(parameters=trainable, always_adapt=True, **decays, **adam, **options)
        for parameter in trainable if decay else ():  # parameter groups would be clipped to a norm of their own
            if parameter.name not in undecayed:
                parameter.regularizer = paddle.regularizer.L2Decay(decay)
        if settings.name == "adam":
            return paddle.optimizer.Adam(parameters=trainable, **adam, **options)
        momentum = {"momentum": settings.momentum, "use_nesterov": settings.nesterov}
        return paddle.optimizer.Momentum(parameters=trainable, **momentum, **options)
