"""Inference of the same network with the weights that ``bench.py`` trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.cases.resnet_mini.pytorch import ResNetMini
from accelmark.infer.case import ClassificationCase, InferBatch, InMemoryBatches
from accelmark.infer.weights import load_weights


class _FromNormalised(nn.Module):
    def __init__(self, network: ResNetMini) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.network.classifier(self.network.features(image).mean((2, 3)))
        return logits


class Case(ClassificationCase):
    input_names = ("image",)

    def build_dataloader(self) -> InMemoryBatches:
        images, labels = map(torch.from_numpy, read_split(self.data_dirs["images"], "test"))
        return InMemoryBatches(((images.float() - MEAN) / STD,), labels, self.settings.batch_size)

    def calibration_batch(self, size: int) -> InferBatch:
        images = torch.from_numpy(read_split(self.data_dirs["images"], "train")[0][:size])
        return InferBatch(((images.float() - MEAN) / STD,), None)

    def create_model(self) -> nn.Module:
        network = ResNetMini(*(self.number(name) for name in ("width", "num_stages", "blocks_per_stage")))
        load_weights(network, Path(__file__).with_name("weights.safetensors"))
        return _FromNormalised(network)

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch((torch.randn(size, 1, 28, 28),), None)
