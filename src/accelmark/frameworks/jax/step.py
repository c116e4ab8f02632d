"""One optimizer step and the evaluation of one batch, traced and compiled by XLA."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, PartitionSpec

from accelmark.frameworks.array_backend import outputs_of_loss
from accelmark.frameworks.jax.layers import building
from accelmark.spec.errors import RequestError
from accelmark.train.case import ArrayCase, Batch


class State(NamedTuple):
    """Everything that a step changes, as dictionaries of arrays: each of Flax's variables takes JAX some us a call."""

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

    def __init__(self, case: ArrayCase, hooks: Any, dtype: Any, mesh: Mesh) -> None:
        """``dtype`` is that of matrix products; ``mesh`` has the ranks' devices along one axis.

        Raises RequestError: activations are to be recomputed, and the model has no blocks.
        """
        self._case, self._hooks, settings = case, hooks, case.settings
        self._clip_norm = settings.gradient_clip_norm
        self._axis: Any = mesh.axis_names[0] if mesh.size > 1 else None
        self._seed, self._dtype, self._precision = settings.seed, dtype, settings.precision
        self._optimizer = hooks.create_optimizer()
        self._abstract = nnx.eval_shape(self._model)
        self.model_class = type(self._abstract).__name__
        if settings.activation_checkpointing == "full":
            self._checkpoint_activations()
        self._graph = nnx.graphdef(self._abstract)
        take: Any = partial(hooks.train_step, self)
        if self._axis is not None:
            whole, split = PartitionSpec(), PartitionSpec(self._axis)
            take = jax.shard_map(
                take, mesh=mesh, in_specs=(whole, whole, split), out_specs=(whole, whole), check_vma=False
            )
        self.take = jax.jit(take, donate_argnums=0)
        """``take(state, learning rate, batches) -> (state, loss)``; ``state`` may not be used again."""
        self.sums = jax.jit(self._sums)
        """``sums(parameters, rest, batch) -> sums of the case``."""
        self.outputs = jax.jit(self._outputs)
        """``outputs(parameters, rest, batch) -> the model's outputs in training mode``."""

    def initial_state(self) -> State:
        """Return the state before the first step, on the default device."""
        parameters, rest = jax.jit(lambda: _split(self._model()))()
        scaler = DynamicScale() if self._precision == "fp16" else None
        return State(parameters, rest, self._optimizer.init(parameters), scaler)

    def _checkpoint_activations(self) -> None:
        modules = (module for _, module in nnx.iter_modules(self._abstract))
        blocks = [module for module in modules if getattr(module, "is_block", False)]
        if not blocks:
            problem = f"{self.model_class} has no blocks whose activations can be recomputed"
            raise RequestError(f"{problem}: set activation_checkpointing=off")
        for block in blocks:
            block.recomputes = True

    def disable_dropout(self) -> None:
        """Let all values through dropout; only before the first step."""
        for _, module in nnx.iter_modules(self._abstract):
            if isinstance(module, nnx.Dropout):
                module.rate = 0.0
        self._graph = nnx.graphdef(self._abstract)

    def loss(self, parameters: Any, rest: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """Return the loss of a training batch, and the model's other variables after it."""
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.train()
        loss = self._case.loss(model, batch)
        return loss, _split(model)[1]

    def _model(self) -> nnx.Module:
        with building(self._seed, self._dtype):
            model: nnx.Module = self._hooks.convert_model(self._case.build_model())
        return model

    def take_step(self, state: State, rate: jax.Array, batches: list[Batch]) -> tuple[State, jax.Array]:
        """Apply the mean of all ranks' gradients, clipped, in the optimizer's direction.

        With several ranks this runs on each device with its own batches.
        """
        parameters, rest, moments, scaler = state
        rest = self._own_keys(rest)
        total, gradients, finite = jnp.zeros(()), None, jnp.array(True)
        for batch in batches:
            if scaler is None:
                (loss, rest), summed = jax.value_and_grad(self.loss, has_aux=True)(parameters, rest, batch)
            else:
                # The mean over the ranks is part of it, so that all ranks agree on the next scale.
                scaled = scaler.value_and_grad(self.loss, has_aux=True, axis_name=self._axis)(parameters, rest, batch)
                scaler, is_finite, (loss, rest), summed = scaled
                finite &= is_finite
            total += loss / len(batches)
            summed = jax.tree.map(lambda gradient: gradient / len(batches), summed)
            gradients = summed if gradients is None else jax.tree.map(jnp.add, gradients, summed)
        if self._axis is not None:
            gradients = jax.lax.pmean(gradients, self._axis) if scaler is None else gradients
            total, rest = jax.lax.pmean(total, self._axis), self._joint(state.rest, rest)
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

    def _own_keys(self, rest: Any) -> Any:
        """Give this rank's batches random keys that differ from other ranks'."""
        if self._axis is None:
            return rest
        index = jax.lax.axis_index(self._axis)
        return jax.tree.map(lambda leaf: jax.random.fold_in(leaf, index) if _is_key(leaf) else leaf, rest)

    def _joint(self, before: Any, after: Any) -> Any:
        """Return the mean of all ranks' running statistics, and the keys that all ranks share."""

        def joint(old: Any, new: Any) -> Any:
            if _is_key(old):
                return old
            return jax.lax.pmean(new, self._axis) if jnp.issubdtype(new.dtype, jnp.floating) else new

        return jax.tree.map(joint, before, after)

    def _sums(self, parameters: Any, rest: Any, batch: Batch) -> Any:
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.eval()
        return self._case.eval_sums(model, batch)

    def _outputs(self, parameters: Any, rest: Any, batch: Batch) -> Any:
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.train()
        return jax.tree.leaves(outputs_of_loss(self._case, model, batch))[0]


def _split(model: nnx.Module) -> tuple[Any, Any]:
    """Return the parameters and the other variables of a model."""
    parameters, rest = nnx.split(model, nnx.Param, ...)[1:]
    return nnx.to_pure_dict(parameters), nnx.to_pure_dict(rest)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
