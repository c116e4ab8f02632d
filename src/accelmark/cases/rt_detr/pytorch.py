"""RT-DETR on COCO in PyTorch."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel, RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

from accelmark.frameworks.pytorch.model.pretrained import backbone_config
from accelmark.frameworks.pytorch.tasks.vision.detection import Detection
from accelmark.train.tasks.image_folder import Uniform
from accelmark.train.tasks.vision.scenes import Scene, distorted

PUBLISHED_NAMES: Final = {
    r"^conv1\.conv1_1\.": "embedder.embedder.0.",
    r"^conv1\.conv1_2\.": "embedder.embedder.1.",
    r"^conv1\.conv1_3\.": "embedder.embedder.2.",
    r"^res_layers\.": "encoder.stages.",
    r"\.blocks\.": ".layers.",
    r"\.branch2a\.": ".layer.0.",
    r"\.branch2b\.": ".layer.1.",
    r"\.branch2c\.": ".layer.2.",
    r"\.short\.conv\.(conv|norm)\.": r".shortcut.1.\1.",
    r"\.short\.": ".shortcut.",
    r"\.conv\.": ".convolution.",
    r"\.norm\.": ".normalization.",
}
"""Names in the weights that RT-DETR's authors publish, with those of transformers."""


class Case(Detection):
    """A ResNet-50-vd, a hybrid encoder, and a decoder whose queries are chosen among the encoder's outputs."""

    samples = "coco"
    weights = "resnet50_vd_weights"
    backbone_name = "model.backbone.model"
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def network(self) -> PreTrainedModel:
        """Build RT-DETR-R50 (Zhao et al. 2023, arXiv:2304.08069)."""
        width = self.number("hidden_size")
        config = RTDetrConfig(
            backbone_config=backbone_config(
                RTDetrResNetConfig,
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
        self.with_weights(net, renamed=PUBLISHED_NAMES)
        return net

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
