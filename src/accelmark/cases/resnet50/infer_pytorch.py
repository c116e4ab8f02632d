"""Inference of ResNet-50 v1.5 on ImageNet."""

from __future__ import annotations

from accelmark.infer.imagenet import ImageNetCase


class Case(ImageNetCase):
    """ImageNet classification with weights in transformers' format (``model.safetensors`` of microsoft/resnet-50)."""

    network_class = "ResNetForImageClassification"
