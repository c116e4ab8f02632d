"""MobileNetV2 on ImageNet in PyTorch."""

from __future__ import annotations

from transformers import MobileNetV2Config, MobileNetV2ForImageClassification, PreTrainedModel

from accelmark.tasks.images.pytorch_imagenet import ImageNetTraining


class Case(ImageNetTraining):
    """The 300-epoch schedule."""

    samples = "imagenet"

    def network(self) -> PreTrainedModel:
        """Build MobileNetV2 with PyTorch's symmetric padding; open runs may change its width."""
        config = MobileNetV2Config(
            depth_multiplier=self.number("width_percent") / 100,
            image_size=self.number("image_size"),
            classifier_dropout_prob=0.2,
            tf_padding=False,
        )
        config.num_labels = self.num_classes
        return MobileNetV2ForImageClassification(config)
