"""Inference of ViT-L/16 on ImageNet."""

from __future__ import annotations

from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from accelmark.infer.imagenet import ImageNetCase
from accelmark.infer.weights import pretrained


class Case(ImageNetCase):
    """ImageNet classification with weights of google/vit-large-patch16-224 in transformers' format."""

    mean = std = (0.5, 0.5, 0.5)

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
        return pretrained(self, ViTForImageClassification(config))
