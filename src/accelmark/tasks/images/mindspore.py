"""Classification with one label per sample."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from accelmark.frameworks.mindspore.case import Batch, TrainCase
from accelmark.tasks.images.arrays import ImageData


class ImageClassification(ImageData, TrainCase):
    """The model returns logits for the batch's ``image``."""

    def loss(self, model: nn.Cell, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        return ops.cross_entropy(model(batch["image"]).astype(ms.float32), batch["label"].astype(ms.int32))

    def eval_sums(self, model: nn.Cell, batch: Batch) -> dict[str, Tensor]:
        """Count correct samples for each accuracy, and add up the cross entropies."""
        logits, label = model(batch["image"]).astype(ms.float32), batch["label"].astype(ms.int32)
        _, best = ops.topk(logits, min(max(self.accuracies.values()), self.num_classes))
        correct = (best == label.reshape(-1, 1)).astype(ms.float32)
        sums = {
            name: correct.narrow(1, 0, min(count, self.num_classes)).sum() for name, count in self.accuracies.items()
        }
        loss = ops.cross_entropy(logits, label, reduction="sum")
        return {**sums, "loss": loss, "count": ops.ones_like(label).astype(ms.float32).sum()}
