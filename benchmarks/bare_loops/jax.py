"""A minimal loop in JAX: one compiled function with Optax's clipping and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from accelmark.frameworks.jax.backend import JaxBackend
from benchmarks.bare_loops import SCHEDULED_STEPS


def bare_loop(backend: JaxBackend, batches: Iterator[Any]) -> None:
    """Train without log and clock."""
    case, settings = backend.case, backend.settings
    clip = settings.gradient_clip_norm
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.optimizer.lr, 100, SCHEDULED_STEPS)
    optimizer = optax.chain(
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
        backend.hooks.create_optimizer(),
        optax.scale_by_learning_rate(schedule),
    )
    graph = backend._compiled._graph

    def loss_of(parameters: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graph, parameters, rest, copy=True)
        model.train()
        loss = case.loss(model, batch)
        return loss, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(parameters: Any, rest: Any, state: Any, batch: Any) -> Any:
        (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, rest, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), rest, state, loss

    clipped, count = optax.EmptyState(), optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    for batch in batches:
        state = backend._state
        moments = (clipped, state.moments, count)
        parameters, rest, moments, _ = step(state.parameters, state.rest, moments, batch)
        clipped, moments, count = moments
        backend._state = state._replace(parameters=parameters, rest=rest, moments=moments)
