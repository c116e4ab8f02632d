"""RT-DETR on COCO in PyTorch."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel, RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

from accelmark.frameworks.pytorch.model.pretrained import load_backbone
from accelmark.frameworks.pytorch.tasks.vision.detection import Detection
from accelmark.train.tasks.image_folder import Uniform
from accelmark.train.tasks.vision.scenes import Scene, distorted

_PARTS: Final = (("conv", "convolution"), ("norm", "normalization"))
PUBLISHED_NAMES: Final = {
    rf"^{before}\.{old}\.": f"{after}.{new}."
    for old, new in _PARTS
    for before, after in (
        *((rf"conv1\.conv1_{number + 1}", f"embedder.embedder.{number}") for number in range(3)),
        *(
            (
                rf"res_layers\.{stage}\.blocks\.(\d)\.branch2{letter}",
                rf"encoder.stages.{stage}.layers.\1.layer.{number}",
            )
            for stage in range(4)
            for number, letter in enumerate("abc")
        ),
        (r"res_layers\.0\.blocks\.0\.short", "encoder.stages.0.layers.0.shortcut"),
        (r"res_layers\.([123])\.blocks\.0\.short\.conv", r"encoder.stages.\1.layers.0.shortcut.1"),
    )
}
"""Names in the weights that RT-DETR's authors publish, with those of transformers."""


class Case(Detection):
    """A ResNet-50-vd, a hybrid encoder, and a decoder whose queries are chosen among the encoder's outputs."""

    samples = "coco"
    weights = "resnet50_vd_weights"
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def network(self) -> PreTrainedModel:
        """Build RT-DETR-R50 (Zhao et al. 2023, arXiv:2304.08069)."""
        width = self.number("hidden_size")
        backbone: Any = RTDetrResNetConfig  # its types do not mention out_features
        config = RTDetrConfig(
            backbone_config=backbone(
                depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
                out_features=["stage2", "stage3", "stage4"],
            ),
            encoder_hidden_dim=width,
            encoder_ffn_dim=4 * width,
            d_model=width,
            decoder_in_channels=[width] * 3,
            decoder_ffn_dim=4 * width,
            decoder_layers=self.number("decoder_layers"),
            num_queries=self.number("num_queries"),
            anchor_image_size=None,
        )
        config.num_labels = self.number("num_classes")
        net = RTDetrForObjectDetection(config)
        load_backbone(self.backbone(net), self.data_dirs.get(self.weights), renamed=PUBLISHED_NAMES)
        return net

    def backbone(self, net: Any) -> PreTrainedModel:
        """Return the part that starts from published weights."""
        part: PreTrainedModel = net.model.backbone.model
        return part

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width."""
        return self.number("image_size"), self.number("image_size")

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return a square, in training with other colours, crops and flips."""
        size = self.number("image_size")
        return distorted(scene, size, uniform) if train else scene.resized(size, size)

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Scale a batch to one of 11 sizes from 0.75 to 1.25 times ``image_size``, a multiple of 32."""
        part = 15 + int(torch.randint(0, 11, (), generator=random))
        size = self.number("image_size") * part // 20 // 32 * 32
        image = F.interpolate(batch["image"].float(), size=(size, size)).to(torch.uint8)
        return {**batch, "image": image, "mask": torch.ones_like(image[:, 0])}

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return as many best pairs of query and class as there are queries."""
        score, chosen = logits.sigmoid().flatten(1).topk(logits.shape[1])
        return score, chosen % logits.shape[2], chosen // logits.shape[2]
