"""Hooks that a vendor may override in JAX, and the optimizers that settings can name, as Optax transformations."""

from __future__ import annotations

from typing import Any, Final

import jax
import optax

from accelmark.train.hooks import ArrayHooks

ALLOWED_HOOKS: Final = ("convert_model", "create_optimizer", "train_step")


class Hooks(ArrayHooks):
    """The default hooks, which a vendor subclasses as ``Extern``.

    All are called while JAX traces. ``train_step`` gets the ``Step`` of ``backend.py``, the state, the learning rate
    and the batches of a step, and returns the new state and the loss.
    """

    def create_optimizer(self) -> Any:
        """Return the optimizer's step before the learning rate, a transformation of Optax with PyTorch's formulas."""
        settings = self.settings.optimizer

        def matrices(parameters: Any) -> Any:
            return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)

        decay = optax.add_decayed_weights(settings.weight_decay, None if settings.decay_norm_and_bias else matrices)
        adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
        if settings.name == "sgd":
            trace = optax.trace(settings.momentum, settings.nesterov) if settings.momentum else optax.identity()
            return optax.chain(decay, trace)
        if settings.name == "adam":
            return optax.chain(decay, adam)
        if settings.name == "adamw":
            return optax.chain(adam, decay)
        return optax.chain(adam, decay, optax.scale_by_trust_ratio())
