"""Images on NumPy arrays: synthetic data and metrics, without model and loss."""

from __future__ import annotations

import numpy as np

from accelmark.tasks.metrics import Classified, ImageSizes
from accelmark.train.batches import Arrays
from accelmark.train.case import ArrayCase


class ImageData(Classified, ImageSizes, ArrayCase):
    """Images as bytes of shape (batch, channels, height, width), and ``label`` of shape (batch,)."""

    def synthetic_batch(self, size: int) -> Arrays:
        """Return random images and labels."""
        random = self.random
        image = random.integers(0, 256, (size, *self.image_shape), np.uint8)
        return {"image": image, "label": random.integers(0, self.num_classes, size)}
