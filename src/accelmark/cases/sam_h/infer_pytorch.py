"""Inference of SAM ViT-H: the mask of an object in a given box."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset
from transformers import SamConfig, SamModel

from accelmark.datasets.images import opened_image
from accelmark.infer.case import InferBatch, InferBatches, InferCase, LoaderBatches
from accelmark.infer.weights import load_given_weights
from accelmark.spec.errors import DataError, raising
from accelmark.tasks.images.data import MEAN, STD

_REDUCED = 4
"""Pixels of the image to a pixel of the mask."""


class BoxedObjects(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The largest object of each image in ``val2017`` that is not a crowd.

    Images have a longer side of ``side`` pixels and are filled up with zeros at the right and at the bottom.
    """

    def __init__(self, directory: Path, side: int) -> None:
        self._folder, self._side = directory / "val2017", side
        self._file = directory / "annotations" / "instances_val2017.json"
        with raising(DataError, f"{self._file}: is not in COCO's format", OSError, ValueError, KeyError, TypeError):
            content = json.loads(self._file.read_bytes())
            images = {image["id"]: image["file_name"] for image in content["images"]}
            largest: dict[int, Any] = {}
            for each in content["annotations"]:
                best = largest.get(each["image_id"])
                if not each["iscrowd"] and (best is None or each["area"] > best["area"]):
                    largest[each["image_id"]] = each
            self._objects = [(images[number], largest[number]) for number in sorted(largest)]
        if not self._objects:
            raise DataError(f"{self._file}: has no object that is not a crowd")

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return image (3, side, side), box (4) and mask (side / 4, side / 4): 1 object, 0 other, -1 not the image."""
        name, annotation = self._objects[index]
        with opened_image(self._folder / name) as file:
            picture = file.convert("RGB")
        scale = self._side / max(picture.size)
        width, height = (max(1, round(length * scale)) for length in picture.size)
        pixels = np.array(picture.resize((width, height), Image.Resampling.BILINEAR), np.float32) / 255
        canvas = np.zeros((3, self._side, self._side), np.float32)
        canvas[:, :height, :width] = ((pixels - MEAN) / STD).transpose(2, 0, 1)
        left, top, across, down = annotation["bbox"]
        box = scale * np.array([left, top, left + across, top + down], np.float32)
        small = max(1, width // _REDUCED), max(1, height // _REDUCED)
        mask = np.full((self._side // _REDUCED,) * 2, -1, np.int8)
        whole = Image.new("L", picture.size)
        no_polygons = raising(
            DataError, f"{self._file}: annotation {annotation['id']} has no polygons", KeyError, TypeError, ValueError
        )
        with no_polygons:
            for polygon in annotation["segmentation"]:
                ImageDraw.Draw(whole).polygon(polygon, fill=1)
        mask[: small[1], : small[0]] = np.array(whole.resize(small))
        return torch.from_numpy(canvas), torch.from_numpy(box), torch.from_numpy(mask)


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
