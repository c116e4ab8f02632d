"""Inference of the small ResNet on the 10,000 test images of Fashion-MNIST, with packaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.cases.resnet_mini.pytorch import ResNetMini
from accelmark.infer.case import ClassificationCase, InferBatch, InMemoryBatches
from accelmark.infer.weights import load_weights

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


class Case(ClassificationCase):
    """Image classification; the normalised test images are kept in memory."""

    input_names = ("image",)

    def build_dataloader(self) -> InMemoryBatches:
        images, labels = map(torch.from_numpy, read_split(self.data_dirs["fashion_mnist"], "test"))
        return InMemoryBatches(((images.float() - MEAN) / STD,), labels, self.settings.batch_size)

    def calibration_batch(self, size: int) -> InferBatch:
        images = torch.from_numpy(read_split(self.data_dirs["fashion_mnist"], "train")[0][:size])
        return InferBatch(((images.float() - MEAN) / STD,), None)

    def create_model(self) -> nn.Module:
        network = ResNetMini(*(self.number(name) for name in ("width", "num_stages", "blocks_per_stage")))
        load_weights(network, _WEIGHTS)
        return _FromNormalised(network)

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch((torch.randn(size, 1, 28, 28),), None)
