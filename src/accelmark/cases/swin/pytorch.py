"""Swin-T on ImageNet in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, SwinConfig, SwinForImageClassification

from accelmark.tasks.images.pytorch_imagenet import ImageNetTraining


class Case(ImageNetTraining):
    """Swin Transformer, tiny, with windows of 7 x 7 patches of 4 pixels."""

    samples = "imagenet"
    block_class = "SwinLayer"

    def network(self) -> PreTrainedModel:
        """Build Swin-T (Liu et al. 2021, arXiv:2103.14030, section 3.3); open runs may use fewer blocks per stage."""
        config = SwinConfig(
            image_size=self.number("image_size"),
            embed_dim=self.number("hidden_size"),
            depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
            num_heads=[3, 6, 12, 24],
            drop_path_rate=0.2,
        )
        config.num_labels = self.num_classes
        return SwinForImageClassification(config)
