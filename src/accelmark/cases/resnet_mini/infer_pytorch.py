"""Inference of the small ResNet on the 10,000 test images of Fashion-MNIST, with packaged weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.cases.resnet_mini._model import ResNetMini
from accelmark.infer.batches import TensorBatches
from accelmark.infer.case import InferBatch, InferCase
from accelmark.infer.weights import load_weights

_SIDE: Final = 28
_NUM_CLASSES: Final = 10
_WEIGHTS: Final = Path(__file__).with_name("weights.safetensors")
"""Weights from a round of ``accelmark train resnet_mini``, recorded in ``weights.json``."""


class _FromNormalised(nn.Module):
    """The network without its normalisation layer, so that all of it can be converted to any precision."""

    def __init__(self, network: ResNetMini) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for normalised images."""
        logits: Tensor = self.network.classifier(self.network.features(image).mean((2, 3)))
        return logits


class Case(InferCase):
    """Image classification; the normalised test images are kept in memory."""

    input_names = ("image",)
    output_names = ("logits",)

    def build_dataloader(self) -> TensorBatches:
        """Read the test split."""
        images, labels = read_split(self.data_dirs["fashion_mnist"], "test")
        return TensorBatches(((images.float() - MEAN) / STD,), labels, self.settings.batch_size)

    def create_model(self) -> nn.Module:
        """Build the network with the packaged weights."""
        widths = [self.number("width") * 2**stage for stage in range(self.number("num_stages"))]
        network = ResNetMini(widths, self.number("blocks_per_stage"), _NUM_CLASSES)
        load_weights(network, _WEIGHTS)
        return _FromNormalised(network)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correct predictions."""
        return {"right": float((outputs[0].argmax(1) == labels).sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return top-1 accuracy."""
        return {"top1": sums["right"] / sums["count"]}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random normalised images."""
        return InferBatch((torch.randn(size, 1, _SIDE, _SIDE),), None)
