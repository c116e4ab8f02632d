"""ResNet-50 v1.5 on ImageNet in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, ResNetConfig, ResNetForImageClassification

from accelmark.tasks.images.pytorch_imagenet import ImageNetTraining


class Case(ImageNetTraining):
    """The 90-epoch schedule."""

    samples = "imagenet"

    def network(self) -> PreTrainedModel:
        """Build ResNet-50 with the stride in the 3x3 convolutions (v1.5); open runs may use fewer blocks per stage."""
        blocks = [self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]
        config = ResNetConfig(embedding_size=64, hidden_sizes=[256, 512, 1024, 2048], depths=blocks)
        config.num_labels = self.num_classes
        return ResNetForImageClassification(config)
