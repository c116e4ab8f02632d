"""One optimizer step and the evaluation of one batch, traced and compiled by XLA."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

from accelmark.frameworks.jax.case import Batch, TrainCase
from accelmark.frameworks.jax.optimizers import direction
from accelmark.spec.settings import TrainSettings


class State(NamedTuple):
    """Everything that a step changes."""

    parameters: Any
    rest: Any
    """The model's other variables: running statistics, random keys."""
    moments: Any
    """The optimizer's state."""
    scaler: DynamicScale | None
    """The loss scale of fp16."""


@final
class Step:
    """Compiled functions of a case's model and optimizer; nothing is computed on the host."""

    def __init__(self, case: TrainCase, settings: TrainSettings) -> None:
        self._case, self._clip_norm = case, settings.gradient_clip_norm
        self._seed, self._precision = settings.seed, settings.precision
        self._optimizer = direction(settings.optimizer)
        abstract = nnx.eval_shape(self._model)
        self.model_class = type(abstract).__name__
        self._graph = nnx.graphdef(abstract)
        self.take = jax.jit(self._take, donate_argnums=0)
        """``take(state, learning rate, batches) -> (state, loss)``; ``state`` may not be used again."""
        self.sums = jax.jit(self._sums)
        """``sums(parameters, rest, batch) -> sums of the case``."""

    def initial_state(self) -> State:
        """Return the state before the first step, on the default device."""
        parameters, rest = jax.jit(lambda: nnx.split(self._model(), nnx.Param, ...)[1:])()
        scaler = DynamicScale() if self._precision == "fp16" else None
        return State(parameters, rest, self._optimizer.init(parameters), scaler)

    def loss(self, parameters: Any, rest: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """Return the loss of a training batch, and the model's other variables after it."""
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.train()
        loss = self._case.loss(model, batch)
        return loss, nnx.split(model, nnx.Param, ...)[2]

    def _model(self) -> nnx.Module:
        return self._case.build_model(nnx.Rngs(self._seed))

    def _take(self, state: State, rate: jax.Array, batches: list[Batch]) -> tuple[State, jax.Array]:
        """Apply the mean of the batches' gradients, clipped, in the optimizer's direction."""
        parameters, rest, moments, scaler = state
        total, gradients, finite = jnp.zeros(()), None, jnp.array(True)
        for batch in batches:
            if scaler is None:
                (loss, rest), found = jax.value_and_grad(self.loss, has_aux=True)(parameters, rest, batch)
            else:
                scaled = scaler.value_and_grad(self.loss, has_aux=True)(parameters, rest, batch)
                scaler, is_finite, (loss, rest), found = scaled
                finite &= is_finite
            total += loss / len(batches)
            found = jax.tree.map(lambda gradient: gradient / len(batches), found)
            gradients = found if gradients is None else jax.tree.map(jnp.add, gradients, found)
        if self._clip_norm is not None:
            factor = jnp.minimum(1.0, self._clip_norm / (optax.global_norm(gradients) + 1e-6))
            gradients = jax.tree.map(lambda gradient: gradient * factor, gradients)
        steps, new_moments = self._optimizer.update(gradients, moments, parameters)
        new_parameters = jax.tree.map(lambda parameter, step: parameter - rate * step, parameters, steps)
        if scaler is not None:  # a step whose scaled gradients overflowed is skipped
            keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
            new_parameters = jax.tree.map(keep, new_parameters, parameters)
            new_moments = jax.tree.map(keep, new_moments, moments)
        return State(new_parameters, rest, new_moments, scaler), total

    def _sums(self, parameters: Any, rest: Any, batch: Batch) -> Any:
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.eval()
        return self._case.eval_sums(model, batch)
