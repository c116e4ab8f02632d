"""EfficientNet-B0 on ImageNet in PyTorch."""

from __future__ import annotations

from transformers import EfficientNetConfig, EfficientNetForImageClassification, PreTrainedModel

from accelmark.frameworks.pytorch.tasks.imagenet_training import ImageNetTraining


class Case(ImageNetTraining):
    """EfficientNet-B0 with dropout and stochastic depth of 0.2."""

    samples = "imagenet"

    def network(self) -> PreTrainedModel:
        """Build EfficientNet; open runs may change width and depth, in per cent of B0's."""
        width = self.number("width_percent")
        config = EfficientNetConfig(
            image_size=self.number("image_size"),
            width_coefficient=width / 100,
            depth_coefficient=self.number("depth_percent") / 100,
            hidden_dim=1280 * width // 100,
            dropout_rate=0.2,
            drop_connect_rate=0.2,
        )
        config.num_labels = self.num_classes
        return EfficientNetForImageClassification(config)
