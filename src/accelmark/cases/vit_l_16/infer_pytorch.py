"""Inference of ViT-L/16 on ImageNet."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

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
    """ImageNet classification with weights of google/vit-large-patch16-224 in transformers' format."""

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def create_model(self) -> nn.Module:
        """Build the network, with the weights from the data directory."""
        config = ViTConfig(
            hidden_size=self.number("hidden_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            intermediate_size=self.number("intermediate_size"),
            image_size=self.number("image_size"),
            patch_size=16,
        )
        config.num_labels = self.number("num_classes")
        net = ViTForImageClassification(config)
        self.trained = "weights" in self.data_dirs
        if self.trained:
            load_weights(net, self.data_dirs["weights"])
        return _Logits(net)
