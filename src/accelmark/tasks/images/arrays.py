"""Images on NumPy arrays: synthetic data, loss and metrics in any framework with the layers ``nn``."""

from __future__ import annotations

from typing import Any

import numpy as np

from accelmark.tasks.metrics import Classified, ImageSizes
from accelmark.train.batches import Arrays
from accelmark.train.case import ArrayCase, Batch, nn


class ImageClassification(Classified, ImageSizes, ArrayCase):
    """One ``label`` for each ``image``: bytes of shape (batch, channels, height, width). The model returns logits."""

    def synthetic_batch(self, size: int) -> Arrays:
        random = self.random
        image = random.integers(0, 256, (size, *self.image_shape), np.uint8)
        return {"image": image, "label": random.integers(0, self.num_classes, size)}

    def loss(self, model: Any, batch: Batch) -> Any:
        return nn.cross_entropy(model(batch["image"]), batch["label"])

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        logits, label = model(batch["image"]), batch["label"]
        sums: dict[str, Any] = nn.num_correct(logits, label, self.accuracies)
        return {**sums, "loss": nn.cross_entropy(logits, label, "sum"), "count": label.shape[0]}
