"""The optimizers that settings can name, as Paddle's."""

from __future__ import annotations

from typing import Any, Final

import paddle
from paddle import nn

from accelmark.spec.settings import OptimizerSettings

OPTIMIZER_CLASSES: Final = {"sgd": "Momentum", "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}


def build_optimizer(model: nn.Layer, settings: OptimizerSettings, clip_norm: float | None) -> Any:
    """Return the optimizer over the trainable parameters of ``model``, with PyTorch's formulas.

    SGD and Adam add weight decay to the gradient; AdamW and LAMB to the step. Gradients are clipped to a global norm of
    ``clip_norm`` if it is given.
    """
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    undecayed = {each.name for each in trainable if each.ndim <= 1 and not settings.decay_norm_and_bias}
    clip = nn.ClipGradByGlobalNorm(clip_norm) if clip_norm is not None else None
    decay = settings.weight_decay
    adam = {"beta1": settings.beta1, "beta2": settings.beta2, "epsilon": settings.eps}
    options: dict[str, Any] = {"learning_rate": settings.lr, "grad_clip": clip}
    match settings.name:
        case "adamw":
            decays = {"weight_decay": decay, "apply_decay_param_fun": lambda name: name not in undecayed}
            return paddle.optimizer.AdamW(parameters=trainable, **decays, **adam, **options)
        case "lamb":
            decays = {"lamb_weight_decay": decay, "exclude_from_weight_decay_fn": lambda each: each.name in undecayed}
            return paddle.optimizer.Lamb(parameters=trainable, **decays, **adam, **options)
        case "adam":
            return paddle.optimizer.Adam(parameters=_groups(trainable, undecayed, decay), **adam, **options)
        case "sgd":
            momentum = {"momentum": settings.momentum, "use_nesterov": settings.nesterov}
            return paddle.optimizer.Momentum(parameters=_groups(trainable, undecayed, decay), **momentum, **options)


def _groups(trainable: list[Any], undecayed: set[str], decay: float) -> list[dict[str, Any]]:
    """Split parameters by whether weight decay is added to their gradients."""
    decayed = [each for each in trainable if each.name not in undecayed]
    rest = [each for each in trainable if each.name in undecayed]
    groups = [(decayed, decay or None), (rest, None)]
    return [{"params": parameters, "weight_decay": added} for parameters, added in groups if parameters]
