"""Classification with one label per sample."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from accelmark.frameworks.tensorflow.case import Batch, TrainCase, cross_entropy
from accelmark.tasks.images.arrays import ImageData


class ImageClassification(ImageData, TrainCase):
    """The model takes images as bytes of shape (batch, height, width, channels), and returns logits."""

    def _logits(self, model: Any, batch: Batch) -> Any:
        return model(tf.transpose(batch["image"], (0, 2, 3, 1)))

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean cross entropy."""
        return tf.reduce_mean(cross_entropy(self._logits(model, batch), batch["label"]))

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Count correct samples for each accuracy, and add up the cross entropies."""
        logits, label = self._logits(model, batch), batch["label"]
        most = min(max(self.accuracies.values()), self.num_classes)
        best = tf.math.top_k(tf.cast(logits, tf.float32), most, index_type=label.dtype).indices
        correct = tf.cast(best == label[:, None], tf.int64)
        sums = {name: tf.reduce_sum(correct[:, :count]) for name, count in self.accuracies.items()}
        return {**sums, "loss": tf.reduce_sum(cross_entropy(logits, label)), "count": tf.size(label)}
