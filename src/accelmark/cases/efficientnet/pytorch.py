"""EfficientNet-B0 on ImageNet in PyTorch."""

from __future__ import annotations

from torch import nn
from transformers import EfficientNetConfig, EfficientNetForImageClassification, PreTrainedModel

from accelmark.tasks.images.pytorch_imagenet import ImageNetTraining


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
        net = EfficientNetForImageClassification(config)
        # transformers draws the scales of normalization near zero, for published weights that replace them: no gradient
        # reaches the first layers. These are the authors' initial weights (Tan and Le 2019, arXiv:1905.11946), whose
        # momentum of 0.99 is 0.01 in PyTorch's definition.
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                module.momentum = 0.01
        return net
