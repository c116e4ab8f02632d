"""Inference of ResNet-50 v1.5 on ImageNet."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from accelmark.cases.imagenet_inference import ImageNetCase
from accelmark.infer.weights import load_weights


class _Logits(nn.Module):
    """Wrapper of transformers' model that returns a plain tensor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.net(image).logits
        return logits


class Case(ImageNetCase):
    """ImageNet classification with weights in transformers' format (``model.safetensors`` of microsoft/resnet-50)."""

    def create_model(self) -> nn.Module:
        """Build the network, with the weights from the data directory."""
        config = ResNetConfig()
        config.num_labels = self.number("num_classes")
        net = ResNetForImageClassification(config)
        self.trained = "weights" in self.data_dirs
        if self.trained:
            load_weights(net, self.data_dirs["weights"])
        return _Logits(net)
