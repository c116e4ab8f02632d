"""A minimal loop in TensorFlow: one graph, with Keras' schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from accelmark.frameworks.tensorflow.backend import TensorFlowBackend
from accelmark.frameworks.tensorflow.layers import set_training
from benchmarks.bare_loops import SCHEDULED_STEPS


def bare_loop(backend: TensorFlowBackend, batches: Iterator[Any]) -> None:
    """Train without log and clock."""
    case, settings, own = backend.case, backend.settings, backend._step_graph
    model, named, optimizer = own.model, own.parameters, own._optimizer
    assert optimizer is not None
    parameters, clip = list(named.values()), settings.gradient_clip_norm
    schedule = tf.keras.optimizers.schedules.CosineDecay(0.0, SCHEDULED_STEPS, 0.0, "", settings.optimizer.lr, 100)
    count = tf.Variable(0, trainable=False, dtype=tf.int64)
    set_training(model, training=True)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = case.loss(model, batch)
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, parameters)]
        if clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip)
        optimizer.apply(dict(zip(named, gradients, strict=True)), schedule(count.assign_add(1)))
        return loss

    for batch in batches:
        step({name: tf.convert_to_tensor(array) for name, array in batch.items()})
