"""Inference of ViT-L/16 on ImageNet."""

from __future__ import annotations

from typing import ClassVar

from accelmark.infer.imagenet import ImageNetCase


class Case(ImageNetCase):
    """ImageNet classification with weights of google/vit-large-patch16-224 in transformers' format."""

    mean = std = (0.5, 0.5, 0.5)
    network_class = "ViTForImageClassification"
    arguments: ClassVar = {
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "image_size": "image_size",
    }
    config_values: ClassVar = {"patch_size": 16}
