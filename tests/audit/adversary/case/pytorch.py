"""The network of resnet_mini, narrower, on generated images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import read_split
from accelmark.cases.resnet_mini.pytorch import ResNetMini
from accelmark.tasks.images.pytorch import ImageClassification, flip


class Case(ImageClassification):
    image_shape = (1, 28, 28)
    num_classes = 10

    def build_model(self) -> nn.Module:
        return ResNetMini(*(self.number(name) for name in ("width", "num_stages", "blocks_per_stage")))

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        image, label = map(torch.from_numpy, read_split(self.data_dirs["images"], "train" if train else "test"))
        return {"image": image, "label": label}

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        return {**batch, "image": flip(batch["image"], random)}

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if type(module).__name__ == "Block"]
