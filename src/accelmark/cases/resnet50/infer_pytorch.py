"""Inference of ResNet-50 v1.5 on ImageNet."""

from __future__ import annotations

from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from accelmark.infer.imagenet import ImageNetCase
from accelmark.infer.weights import pretrained


class Case(ImageNetCase):
    """ImageNet classification with weights in transformers' format (``model.safetensors`` of microsoft/resnet-50)."""

    def create_model(self) -> nn.Module:
        """Build the network, with the weights from the data directory."""
        config = ResNetConfig()
        config.num_labels = self.number("num_classes")
        return pretrained(self, ResNetForImageClassification(config))
