"""Inference of EfficientNet-Lite0 with packaged weights, on ImageNet if given, else on four photographs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from accelmark.cases.efficientnet_lite0._model import EfficientNetLite0
from accelmark.infer.case import ImageNetCase, InferBatches, InMemoryBatches
from accelmark.tasks.images.data import centre_box, opened_image

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
        """Build the network with its packaged weights."""
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
