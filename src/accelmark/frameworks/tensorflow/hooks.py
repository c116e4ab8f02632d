"""Hooks that a vendor may override in TensorFlow, and the optimizers that settings can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from accelmark.spec.settings.training import OptimizerSettings
from accelmark.train.hooks import ArrayHooks

ALLOWED_HOOKS: Final = ("convert_model", "create_optimizer", "train_step")


class Optimizer:
    """SGD and Adam add weight decay to the gradient; AdamW and LAMB to the step."""

    def __init__(self, settings: OptimizerSettings, parameters: Mapping[str, Any]) -> None:
        """Make the state of each parameter."""
        self._settings, self._parameters = settings, parameters
        slots = ("momentum",) if settings.name == "sgd" else ("mean", "square")
        self._slots = {
            slot: {name: tf.Variable(tf.zeros_like(value), trainable=False) for name, value in parameters.items()}
            for slot in slots
        }
        self._count = tf.Variable(0.0, trainable=False)

    def variables(self) -> dict[str, Any]:
        """Return the state by name."""
        slots = {f"{slot}.{name}": tensor for slot, named in self._slots.items() for name, tensor in named.items()}
        return {**slots, "count": self._count}

    def apply(self, gradients: Mapping[str, Any], rate: Any) -> None:
        """Move each parameter by its step times the learning rate."""
        self._count.assign_add(1.0)
        for name, parameter in self._parameters.items():
            decays = self._settings.decay_norm_and_bias or parameter.shape.rank > 1
            decay = self._settings.weight_decay * parameter if decays else tf.zeros_like(parameter)
            parameter.assign_sub(rate * self._step(name, gradients[name], parameter, decay))

    def _step(self, name: str, gradient: Any, parameter: Any, decay: Any) -> Any:
        kind = self._settings.name
        if kind == "sgd":
            gradient += decay
            if not self._settings.momentum:
                return gradient
            velocity = self._slots["momentum"][name]
            moved = velocity.assign(self._settings.momentum * velocity + gradient)
            return gradient + self._settings.momentum * moved if self._settings.nesterov else moved
        if kind == "adam":
            return self._adam(name, gradient + decay)
        step = self._adam(name, gradient) + decay
        if kind == "adamw":
            return step
        norm, step_norm = tf.norm(parameter), tf.norm(step)
        usable = (norm > 0) & (step_norm > 0)
        return step * tf.where(usable, norm / tf.where(usable, step_norm, 1.0), 1.0)

    def _adam(self, name: str, gradient: Any) -> Any:
        beta1, beta2 = self._settings.beta1, self._settings.beta2
        mean, square = self._slots["mean"][name], self._slots["square"][name]
        mean = mean.assign(beta1 * mean + (1 - beta1) * gradient)
        square = square.assign(beta2 * square + (1 - beta2) * tf.square(gradient))
        corrected = mean / (1 - beta1**self._count)
        return corrected / (tf.sqrt(square / (1 - beta2**self._count)) + self._settings.eps)


class Hooks(ArrayHooks):
    """The default hooks, which a vendor subclasses as ``Extern``.

    ``train_step`` is called while the step is traced. It gets the ``Step`` of ``backend.py``, the batches of a step,
    the learning rate and the seed of dropout, and returns what ``Step.take_step`` returns.
    """

    def create_optimizer(self, parameters: Any) -> Any:
        """Return the optimizer over variables by name."""
        return Optimizer(self.settings.optimizer, parameters)
