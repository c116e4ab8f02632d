"""ResNet-50 v1.5 on ImageNet in JAX, MindSpore and TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from accelmark.spec.backports import zip_strict
from accelmark.tasks.images.arrays import ImageClassification
from accelmark.tasks.images.data import MEAN, STD, ArrayImages
from accelmark.train.case import conv_flops, dense_flops, nn
from accelmark.train.loop.ends import scaled_learning_rate

WIDTHS: Final = (256, 512, 1024, 2048)
"""Channels of each stage's output; within a block a quarter of them."""


class ConvNorm(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, channels_in: int, channels_out: int, size: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv(channels_in, channels_out, size, nn.normal_fan_out, stride, padding=size // 2)
        self.normalization = nn.BatchNorm(channels_out)

    def forward(self, x: Any) -> Any:
        return self.normalization(self.convolution(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride (v1.5) and 1x1 convolutions, with a shortcut that is projected if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        inner = channels_out // 4
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut = ConvNorm(channels_in, channels_out, 1, stride)
        self.layer = nn.List([
            ConvNorm(channels_in, inner, 1, 1), ConvNorm(inner, inner, 3, stride), ConvNorm(inner, channels_out, 1, 1),
        ])  # fmt: skip

    def forward(self, x: Any) -> Any:
        first, second, third = self.layer
        shortcut = self.shortcut(x) if self.is_projected else x
        return nn.relu(third(nn.relu(second(nn.relu(first(x))))) + shortcut)


class Stage(nn.Module):
    """Blocks of one width."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, blocks: int) -> None:
        super().__init__()
        self.layers = nn.List([
            Bottleneck(channels_out if block else channels_in, channels_out, 1 if block else stride)
            for block in range(blocks)
        ])  # fmt: skip

    def forward(self, x: Any) -> Any:
        for block in self.layers:
            x = block(x)
        return x


class ResNet50(nn.Module):
    """uint8 images (batch, 3, height, width) to logits."""

    def __init__(self, blocks: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.normalize = nn.Normalize([255 * mean for mean in MEAN], [255 * std for std in STD])
        self.embedder, self.pool = ConvNorm(3, 64, 7, 2), nn.MaxPool(3, 2, padding=1)
        self.stages = nn.List([
            Stage(before, width, 2 if stage else 1, count)
            for stage, (before, width, count) in enumerate(zip((64, *WIDTHS), WIDTHS, blocks))
        ])  # fmt: skip
        self.classifier = nn.Linear(WIDTHS[-1], num_classes, nn.uniform, bias=nn.uniform)

    def forward(self, image: Any) -> Any:
        """Return logits of shape (batch, classes)."""
        x = self.pool(nn.relu(self.embedder(self.normalize(image))))
        for stage in self.stages:
            x = stage(x)
        return self.classifier(nn.global_mean(x))


class Case(ImageClassification):
    """The 90-epoch schedule: random resized crops, flipped with probability 0.5, normalised on the device."""

    accuracies: ClassVar = {"top1": 1, "top5": 5}
    reference_names: ClassVar = {
        r"^embedder\.": "net.resnet.embedder.embedder.",
        r"^stages\.": "net.resnet.encoder.stages.",
        r"^classifier\.": "net.classifier.1.",
    }

    @property
    def blocks(self) -> list[int]:
        """Blocks of each stage; open runs may use fewer."""
        return [self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]

    def build_model(self) -> Any:
        return ResNet50(self.blocks, self.num_classes)

    def dataset(self, *, train: bool) -> ArrayImages:
        """Return the images of ``train``, or centre crops of the images of ``val``."""
        return ArrayImages(
            self.data_dirs["imagenet"],
            "train" if train else "val",
            num_classes=self.num_classes,
            size=self.number("image_size"),
            train=train,
            draft=bool(self.settings.model["jpeg_draft"]),
        )

    def peak_learning_rate(self) -> float:
        """Scale the learning rate by the global batch."""
        return scaled_learning_rate(self.settings, self.place.world_size, self.number("lr_batch_size"))

    def flops_per_sample(self) -> float:
        """Return the FLOPs of convolutions and classifier (He et al. 2015, arXiv:1512.03385, with v1.5's strides)."""
        return sum(self._conv_flops()) + dense_flops(WIDTHS[-1] * self.num_classes, 1)

    def _conv_flops(self) -> Iterator[float]:
        size = -(-self.number("image_size") // 2)
        yield conv_flops(size, 7, 3, 64, is_first=True)
        size, before = -(-size // 2), 64
        for stage, (width, blocks) in enumerate(zip_strict(WIDTHS, self.blocks)):
            for block in range(blocks):
                after = -(-size // 2) if stage and not block else size
                yield conv_flops(size, 1, before, width // 4)
                yield conv_flops(after, 3, width // 4, width // 4)
                yield conv_flops(after, 1, width // 4, width)
                if not block:
                    yield conv_flops(after, 1, before, width)
                size, before = after, width
