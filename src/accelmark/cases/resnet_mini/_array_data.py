"""The data of the small ResNet for frameworks with NumPy batches."""

from __future__ import annotations

import numpy as np

from accelmark.cases.resnet_mini._fashion import NUM_CLASSES, SIDE, flip, read_split
from accelmark.tasks.images.arrays import ImageData
from accelmark.train.batches import Arrays


class FashionImages(ImageData):
    """Fashion-MNIST in memory as bytes; the model normalises them."""

    image_shape = (1, SIDE, SIDE)
    num_classes = NUM_CLASSES

    def dataset(self, *, train: bool) -> Arrays:
        """Return the 60,000 training or the 10,000 test images."""
        image, label = read_split(self.data_dirs["fashion_mnist"], "train" if train else "test")
        return {"image": image, "label": label}

    def augment(self, batch: Arrays, random: np.random.Generator) -> Arrays:
        """Flip half of the images."""
        return {**batch, "image": flip(batch["image"], random)}
