"""One optimizer step and the evaluation of one batch, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

import tensorflow as tf

from accelmark.frameworks.array_backend import outputs_of_loss
from accelmark.frameworks.tensorflow.layers import Dropout, building, drawing, named_variables, set_training
from accelmark.frameworks.tensorflow.ranks import Ranks
from accelmark.spec.backports import zip_strict
from accelmark.train.case import ArrayCase, Batch

_FIRST_SCALE: Final = 2.0**15
_GROWTH_STEPS: Final = 2000
"""Steps without overflow after which the loss scale doubles; an overflow halves it (Micikevicius et al. 2017)."""


def _graph(function: Callable[..., Any]) -> Any:
    """Return a function that is traced once for each shape of its arguments; Python decides while it is traced."""
    return tf.function(function, autograph=False)


@final
class Step:
    """A case's model with its optimizer; gradients are averaged over the ranks."""

    def __init__(self, case: ArrayCase, hooks: Any, dtype: Any, ranks: Ranks) -> None:
        """Build the model, the same on every rank; matrix products compute in ``dtype``."""
        self._case, self._settings, self._ranks, self._hooks = case, case.settings, ranks, hooks
        with building(case.settings.seed, dtype):
            self.model: Any = hooks.convert_model(case.build_model())
        self.variables = named_variables(self.model)
        """All variables of the model by name."""
        self.parameters = {name: variable for name, variable in self.variables.items() if variable.trainable}
        self._optimizer: Any = None
        self._scale: Any = None
        self.take: Any = _graph(lambda *inputs: ranks.run(partial(hooks.train_step, self), inputs))
        """``take(batches, learning rate, seed) -> (loss, when the gradients were ready: seconds since 1970)``."""
        self.sums: Any = _graph(self._sums)
        """``sums(batch) -> sums of the case``."""
        self.outputs: Any = _graph(self._outputs)
        """``outputs(batch) -> the model's outputs in training mode``."""

    def disable_dropout(self) -> None:
        """Let all values through dropout; only before the first step."""
        for layer in self.model.submodules:
            if isinstance(layer, Dropout):
                layer.rate = 0.0

    def build_optimizer(self) -> None:
        """Make the optimizer's state, and the loss scale of fp16."""
        self._optimizer = self._hooks.create_optimizer(self.parameters)
        if self._settings.precision == "fp16":
            self._scale = tf.Variable(_FIRST_SCALE, trainable=False)
            self._finite_steps = tf.Variable(0.0, trainable=False)

    def state(self) -> dict[str, Any]:
        """Return all variables that a step changes by name."""
        state = {f"model.{name}": variable for name, variable in self.variables.items()}
        if self._optimizer is not None:
            state |= {f"optimizer.{name}": variable for name, variable in self._optimizer.variables().items()}
        if self._scale is not None:
            state |= {"scale.value": self._scale, "scale.finite_steps": self._finite_steps}
        return state

    def _gradients(self, batch: Batch, scale: Any) -> tuple[Any, list[Any]]:
        parameters = list(self.parameters.values())
        with tf.GradientTape() as tape:
            loss = self._case.loss(self.model, batch)
            scaled = loss if scale is None else loss * scale
        return loss, [tf.convert_to_tensor(each) for each in tape.gradient(scaled, parameters)]

    def take_step(self, batches: list[Batch], rate: Any, seed: Any) -> Any:
        """Apply the mean of all ranks' gradients, clipped, on each rank with its own batches and seed of dropout."""
        set_training(self.model, training=True)
        total: Any = 0.0
        gradients: list[Any] = []
        with drawing(seed):
            for batch in batches:
                loss, of_batch = self._gradients(batch, self._scale)
                of_batch = [gradient / len(batches) for gradient in of_batch]
                gradients = [old + new for old, new in zip_strict(gradients, of_batch)] if gradients else of_batch
                total += loss / len(batches)
        if self._scale is not None:
            gradients = [each / self._scale for each in gradients]
        with tf.control_dependencies(gradients):
            ready = tf.timestamp()
        total, *gradients = self._ranks.mean_of([total, *gradients])
        norm = tf.linalg.global_norm(gradients)
        if self._settings.gradient_clip_norm is not None:
            factor = tf.minimum(1.0, self._settings.gradient_clip_norm / (norm + 1e-6))
            gradients = [each * factor for each in gradients]
        named = dict(zip_strict(self.parameters, gradients))
        if self._scale is None:
            self._apply(named, rate)
        else:  # a step whose scaled gradients overflowed is skipped
            finite = tf.math.is_finite(norm)
            tf.cond(finite, lambda: self._apply(named, rate), lambda: 0.0)
            self._rescale(finite)
        return total, ready

    def _apply(self, gradients: Mapping[str, Any], rate: Any) -> float:
        if self._optimizer is None:
            raise RuntimeError("build_optimizer() was not called")
        self._optimizer.apply(gradients, rate)
        return 0.0

    def _rescale(self, finite: Any) -> None:
        steps = self._finite_steps.assign(tf.where(finite, self._finite_steps + 1, 0.0))
        grows = steps >= _GROWTH_STEPS
        self._scale.assign(self._scale * tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5))
        self._finite_steps.assign(tf.where(grows, 0.0, steps))

    def _sums(self, batch: Batch) -> Mapping[str, Any]:
        set_training(self.model, training=False)
        return self._case.eval_sums(self.model, batch)

    def _outputs(self, batch: Batch) -> Any:
        set_training(self.model, training=True)
        return outputs_of_loss(self._case, self.model, batch)
