"""ViT-B/16 on ImageNet in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from accelmark.tasks.images.pytorch_imagenet import ImageNetTraining


class Case(ImageNetTraining):
    """Vision Transformer with patches of 16 pixels."""

    samples = "imagenet"
    block_class = "ViTLayer"

    def network(self) -> PreTrainedModel:
        """Build ViT-B/16 (Dosovitskiy et al. 2020, arXiv:2010.11929, table 1)."""
        config = ViTConfig(**self.dimensions(), image_size=self.number("image_size"), patch_size=16)
        config.num_labels = self.num_classes
        return ViTForImageClassification(config)
