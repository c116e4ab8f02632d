"""Classification with one label per sample."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from accelmark.frameworks.tensorflow.case import Batch, TrainCase, cross_entropy
from accelmark.train.tasks.array_families import ImageData


class ImageClassification(ImageData, TrainCase):
    """The model takes images as bytes of shape (batch, height, width, channels), and returns logits."""

    def _logits(self, model: Any, batch: Batch) -> Any:
        return model(tf.transpose(batch["image"], (0, 2, 3, 1)))

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean cross entropy."""
        return tf.reduce_mean(cross_entropy(self._logits(model, batch), batch["label"]))

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Count correct samples, and add up the cross entropies."""
        logits, label = self._logits(model, batch), batch["label"]
        correct = tf.cast(tf.argmax(logits, -1, label.dtype) == label, tf.int64)
        loss = tf.reduce_sum(cross_entropy(logits, label))
        return {"top1": tf.reduce_sum(correct), "loss": loss, "count": tf.size(label)}
