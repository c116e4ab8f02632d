"""Inference of SAM ViT-H: the mask of an object in a given box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import SamConfig, SamModel

from accelmark.cases.sam_h._objects import BoxedObjects
from accelmark.infer.case import InferBatch, InferBatches, InferCase, LoaderBatches
from accelmark.infer.weights import load_given_weights


class _Masks(nn.Module):
    """SAM with a box for each image; returns the logits of a mask at a quarter of the resolution."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor, box: Tensor) -> Tensor:
        """Return logits (items, side / 4, side / 4, 1) for images (items, 3, side, side) and boxes (items, 4)."""
        outputs = self.net(pixel_values=image, input_boxes=box[:, None], multimask_output=False)
        masks: Tensor = outputs.pred_masks[:, 0, 0, :, :, None]
        return masks


class Case(InferCase):
    """The largest object of each image of COCO's ``val2017``, with weights of facebook/sam-vit-huge."""

    input_names = ("image", "box")
    output_names = ("mask",)

    def create_model(self) -> nn.Module:
        """Build the network (Kirillov et al. 2023, arXiv:2304.02643), with weights from the data directory."""
        side, layers, width = (self.number(name) for name in ("image_size", "num_layers", "hidden_size"))
        vision = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": self.number("num_heads"),
            "global_attn_indexes": [layers * part // 4 - 1 for part in (1, 2, 3, 4)],
            "image_size": side,
        }
        config = SamConfig(
            vision_config=vision, prompt_encoder_config={"image_size": side, "image_embedding_size": side // 16}
        )
        net = SamModel(config)
        load_given_weights(self, net)
        return _Masks(net)

    def build_dataloader(self) -> InferBatches:
        """Read images in worker processes."""
        coco = self.data_dir("coco", "coco/val2017 and coco/annotations")
        return LoaderBatches(BoxedObjects(coco, self.number("image_size")), self.settings)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Add up intersections over unions; pixels of -1, outside of the image, are not counted."""
        predicted, truth = (outputs[0][..., 0] > 0) & (labels >= 0), labels > 0
        shared, union = ((predicted & truth).sum((1, 2)), (predicted | truth).sum((1, 2)))
        return {"overlap": float((shared / union.clamp_min(1)).sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean intersection over union of the objects."""
        return {"miou": sums["overlap"] / max(1.0, sums["count"])}

    def perturbed(self, batch: InferBatch, generator: Generator) -> tuple[Tensor, ...]:
        """Add noise to the images, and leave the boxes."""
        image, _ = super().perturbed(batch, generator)
        return image, batch.inputs[1]

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random normalised images with a box each."""
        side = self.number("image_size")
        corners = torch.rand(size, 2) * side / 2
        return InferBatch((torch.randn(size, 3, side, side), torch.cat([corners, corners + side / 4], 1)), None)
