"""Classification with one label per sample."""

from __future__ import annotations

from collections.abc import Mapping

import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.frameworks.paddle.case import Batch, TrainCase
from accelmark.tasks.images.arrays import ImageData


class ImageClassification(ImageData, TrainCase):
    """The model returns logits for the batch's ``image``."""

    def loss(self, model: nn.Layer, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(model(batch["image"]), batch["label"])

    def eval_sums(self, model: nn.Layer, batch: Batch) -> Mapping[str, Tensor]:
        """Count correct samples for each accuracy, and add up the cross entropies."""
        logits, label = model(batch["image"]).astype("float32"), batch["label"]
        _, best = logits.topk(min(max(self.accuracies.values()), self.num_classes))
        correct = best == label[:, None]
        sums = {name: correct[:, :count].sum() for name, count in self.accuracies.items()}
        loss = F.cross_entropy(logits, label, reduction="sum")
        return {**sums, "loss": loss, "count": label.numel()}
