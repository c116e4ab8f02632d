"""The optimizers that settings can name, as Optax transformations."""

from __future__ import annotations

from typing import Any

import jax
import optax

from accelmark.spec.settings.training import OptimizerSettings


def direction(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Return the optimizer's step before the learning rate, with PyTorch's formulas.

    SGD and Adam add weight decay to the gradient; AdamW and LAMB to the step.
    """
    decay = optax.add_decayed_weights(settings.weight_decay, None if settings.decay_norm_and_bias else _matrices)
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
    if settings.name == "sgd":
        trace = optax.trace(settings.momentum, settings.nesterov) if settings.momentum else optax.identity()
        return optax.chain(decay, trace)
    if settings.name == "adam":
        return optax.chain(decay, adam)
    if settings.name == "adamw":
        return optax.chain(adam, decay)
    return optax.chain(adam, decay, optax.scale_by_trust_ratio())


def _matrices(parameters: Any) -> Any:
    """Select the parameters with more than one dimension, to which weight decay applies."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)
