"""Inference of EfficientNet-Lite0 with packaged weights, on ImageNet if given, else on four photographs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor, nn

from accelmark.datasets.images import opened_image
from accelmark.infer.case import InferBatches, InMemoryBatches
from accelmark.infer.imagenet import ImageNetCase
from accelmark.spec.backports import zip_strict
from accelmark.tasks.images.data import centre_box

_STAGES: Final = (
    # repeats, kernel, stride, expansion, channels out
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM: Final = 32
_HEAD: Final = 1280


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class SamePadded(nn.Conv2d):
    """A convolution with TensorFlow's padding: an odd pixel is added at the right and the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of ``x``, of size ceil(size / stride)."""
        pad = []
        for size, kernel, stride in zip_strict(reversed(x.shape[-2:]), self.kernel_size, self.stride):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pad += [total // 2, total - total // 2]
        convolved: Tensor = self._conv_forward(F.pad(x, pad), self.weight, self.bias)
        return convolved


class Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a shortcut if the shape is unchanged."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels_in * expansion
        self.expands = expansion != 1
        self.adds = stride == 1 and channels_in == channels_out
        if self.expands:
            self._expand_conv = nn.Conv2d(channels_in, inner, 1, bias=False)
            self._bn0 = _norm(inner)
        self._depthwise_conv = SamePadded(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1 = _norm(inner)
        self._project_conv = nn.Conv2d(inner, channels_out, 1, bias=False)
        self._bn2 = _norm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        projected: Tensor = self._bn2(self._project_conv(inner))
        return projected + x if self.adds else projected


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: normalised images to logits of ImageNet's 1,000 classes."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = SamePadded(3, _STEM, 3, 2, bias=False)
        self._bn0 = _norm(_STEM)
        blocks: list[nn.Module] = []
        before = _STEM
        for repeats, kernel, stride, expansion, channels in _STAGES:
            for index in range(repeats):
                blocks.append(Block(before, channels, kernel, 1 if index else stride, expansion))
                before = channels
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(before, _HEAD, 1, bias=False)
        self._bn1 = _norm(_HEAD)
        self._fc = nn.Linear(_HEAD, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        x = F.relu6(self._bn0(self._conv_stem(image)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((2, 3)))
        return logits


_PHOTOS: Final = {
    "chelsea.png": (281, 282, 285),
    "coffee.png": (967, 968),
    "motorcycle_left.png": (665, 670),
    "rocket.jpg": (657, 744),
}
"""Photograph (cat, coffee, motorcycle, rocket) -> correct ImageNet classes."""


class Case(ImageNetCase):
    """Image classification; without ImageNet the accuracy is a sanity check on four photographs (marks the run)."""

    mean = (127 / 255,) * 3
    std = (128 / 255,) * 3

    def build_dataloader(self) -> InferBatches:
        """Read ImageNet's validation images, or the photographs."""
        if "imagenet" in self.data_dirs:
            return super().build_dataloader()
        self.partial = True
        images = torch.stack([self._photo(name) for name in _PHOTOS])
        accepted = torch.zeros(len(_PHOTOS), self.number("num_classes"), dtype=torch.bool)
        for row, classes in enumerate(_PHOTOS.values()):
            accepted[row, list(classes)] = True
        return InMemoryBatches((images,), accepted, self.settings.batch_size)

    def _photo(self, name: str) -> Tensor:
        side = self.number("image_size")
        with opened_image(self.data_dirs["photos"] / name) as file:
            image = file.convert("RGB")
        image = image.resize((side, side), Image.Resampling.BICUBIC, box=centre_box(image.size))
        mean, std = self.constants()
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() - mean) / std

    def create_model(self) -> nn.Module:
        model = EfficientNetLite0(self.number("num_classes"))
        if not self.settings.synthetic:
            path = self.data_dirs["efficientnet_lite0"] / "efficientnet-lite0-57934424.pth"
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correct predictions; each class of a photograph is accepted."""
        if labels.ndim == 1:
            return super().evaluator(outputs, labels)
        right = labels.gather(1, outputs[0].argmax(1, keepdim=True))
        return {"right": float(right.sum()), "count": float(len(labels))}
