"""Object detection by models of transformers that predict a set of boxes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from PIL import Image, ImageEnhance
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelmark.datasets.images import opened_image
from accelmark.frameworks.pytorch.batches import ReadSamples, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import backbone_config, with_padding
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, raising
from accelmark.tasks.images.data import Uniform
from accelmark.tasks.images.pytorch_imagenet import ByteImageNetwork, DenseTask, FullPrecision, sum_of_outputs
from accelmark.tasks.metrics import box_precision

_OVERLAPS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Least overlaps of a box with a crop (Liu et al. 2016, arXiv:1512.02325, section 2.2); 1: no crop."""
_TRIES: Final = 40


@dataclass(frozen=True)
class Scene:
    """An image with ``n`` boxes."""

    image: Image.Image
    boxes: npt.NDArray[np.float64]
    """Left, top, right, bottom in pixels, of shape (n, 4)."""
    labels: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.int64]
    """1 where a box contains several objects that are not marked apart, which evaluation ignores."""

    def flipped(self) -> Scene:
        """Return its mirror image."""
        boxes = self.boxes[:, [2, 1, 0, 3]]
        boxes[:, [0, 2]] = self.image.width - boxes[:, [0, 2]]
        return replace(self, image=self.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), boxes=boxes)

    def resized(self, width: int, height: int) -> Scene:
        """Return it with other sizes."""
        across, down = width / self.image.width, height / self.image.height
        image = self.image.resize((width, height), Image.Resampling.BILINEAR)
        return replace(self, image=image, boxes=self.boxes * [across, down, across, down])

    def shorter(self, side: int, longest: int) -> Scene:
        """Return it with a shorter side of ``side`` pixels, or less where the longer one would exceed ``longest``."""
        low, high = sorted(self.image.size)
        scale = min(side / low, longest / high)
        return self.resized(max(1, round(self.image.width * scale)), max(1, round(self.image.height * scale)))

    def cropped(self, left: int, top: int, width: int, height: int) -> Scene:
        """Return a part, with the parts of the boxes inside it; boxes without a pixel in it are left out."""
        boxes = np.clip(self.boxes - [left, top, left, top], 0, [width, height, width, height])
        inside = (boxes[:, 2:] - boxes[:, :2]).min(1, initial=np.inf) >= 1
        image = self.image.crop((left, top, left + width, top + height))
        return Scene(image, boxes[inside], self.labels[inside], self.crowd[inside])


def whole_number(low: int, high: int, uniform: Uniform) -> int:
    """Return a random number from ``low`` to ``high``."""
    return low + int(uniform() * (high - low + 1))


def multi_scale(scene: Scene, side: int, longest: int, uniform: Uniform) -> Scene:
    """Augment as DETR (Carion et al. 2020, arXiv:2005.12872, section 4): a flip, and one of 11 sizes, cropped or not.

    All sizes are in proportion to the paper's, whose largest shorter side (``side``) has 800 pixels.
    """
    scene = scene.flipped() if uniform() < 0.5 else scene
    if uniform() < 0.5:
        scene = scene.shorter(side * whole_number(4, 6, uniform) // 8, 10 * side)
        least, most = round(0.48 * side), round(0.75 * side)
        width, height = (whole_number(min(least, each), min(each, most), uniform) for each in scene.image.size)
        left = whole_number(0, scene.image.width - width, uniform)
        top = whole_number(0, scene.image.height - height, uniform)
        scene = scene.cropped(left, top, width, height)
    return scene.shorter(round(side * whole_number(15, 25, uniform) / 25), longest)


def distorted(scene: Scene, size: int, uniform: Uniform) -> Scene:
    """Augment as RT-DETR (Zhao et al. 2023, arXiv:2304.08069): colours, smaller images, crops, flips; a square."""
    if uniform() < 0.5:
        scene = replace(scene, image=coloured(scene.image, uniform))
    if uniform() < 0.5:
        scene = zoomed_out(scene, uniform)
    if uniform() < 0.8:
        scene = overlapping_crop(scene, uniform)
    if uniform() < 0.5:
        scene = scene.flipped()
    return scene.resized(size, size)


def zoomed_out(scene: Scene, uniform: Uniform) -> Scene:
    """Return the scene somewhere on a black canvas of one to four times its sides."""
    scale = 1 + 3 * uniform()
    width, height = (int(side * scale) for side in scene.image.size)
    left = whole_number(0, width - scene.image.width, uniform)
    top = whole_number(0, height - scene.image.height, uniform)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(scene.image, (left, top))
    return replace(scene, image=canvas, boxes=scene.boxes + np.array([left, top, left, top]))


def overlapping_crop(scene: Scene, uniform: Uniform) -> Scene:
    """Return a crop that a box overlaps by at least a random share, with the boxes whose centre is inside."""
    if not len(scene.boxes) or (least := _OVERLAPS[whole_number(0, len(_OVERLAPS) - 1, uniform)]) == 1:
        return scene
    for _ in range(_TRIES):
        width, height = (int(side * (0.3 + 0.7 * uniform())) for side in scene.image.size)
        if not height or not 0.5 < width / height < 2:
            continue
        left = whole_number(0, scene.image.width - width, uniform)
        top = whole_number(0, scene.image.height - height, uniform)
        crop = np.array([left, top, left + width, top + height])
        centres = (scene.boxes[:, :2] + scene.boxes[:, 2:]) / 2
        inside = ((centres > crop[:2]) & (centres < crop[2:])).all(1)
        if inside.any() and overlaps(scene.boxes[inside], crop).max() >= least:
            selected = replace(scene, boxes=scene.boxes[inside], labels=scene.labels[inside], crowd=scene.crowd[inside])
            return selected.cropped(left, top, width, height)
    return scene


def overlaps(boxes: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return intersection over union of each box with another one."""
    shared = np.clip(np.minimum(boxes[:, 2:], other[2:]) - np.maximum(boxes[:, :2], other[:2]), 0, None).prod(1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (other[2:] - other[:2]).prod() - shared
    ratios: npt.NDArray[np.float64] = shared / union
    return ratios


def coloured(image: Image.Image, uniform: Uniform) -> Image.Image:
    """Return it with other brightness, contrast, saturation and hue, each with probability 0.5."""
    changes = ((ImageEnhance.Brightness, 0.125), (ImageEnhance.Contrast, 0.5), (ImageEnhance.Color, 0.5))
    for enhance, most in changes:
        if uniform() < 0.5:
            image = enhance(image).enhance(1 + most * (2 * uniform() - 1))
    if uniform() < 0.5:
        shift = round(0.05 * (2 * uniform() - 1) * 256)
        hue, saturation, value = image.convert("HSV").split()
        turned = hue.point([(each + shift) % 256 for each in range(256)])
        image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    return image


_OUTSIDE_PX: Final = 5.0
"""Boxes of COCO reach over the edge by fractions of a pixel, which is cut off; more than this is an error."""


class BoxedImages:
    """The images of a split with their boxes.

    Training leaves out crowds, boxes without area and images without boxes; evaluation has all of them. A box's label
    is its category's id, or where there are ``num_classes`` categories, the position of its id among them.

    Raises DataError: the annotations cannot be read, have no image or class for a box, or a box lies outside of its
    image.
    """

    def __init__(self, directory: Path, split: str, *, num_classes: int, train: bool) -> None:
        self._folder = directory / split
        self._file = directory / "annotations" / f"instances_{split}.json"
        with raising(DataError, f"{self._file}: is not in COCO's format", OSError, KeyError, TypeError, ValueError):
            # Outlines of objects are dropped while the file is read: of all of COCO's they would take gigabytes.
            drop = lambda values: {name: value for name, value in values.items() if name != "segmentation"}  # noqa: E731
            content = json.loads(self._file.read_bytes(), object_hook=drop)
            images = {image["id"]: image for image in content["images"]}
            sizes = {each: (image["width"], image["height"]) for each, image in images.items()}
            labels = self._labels([each["id"] for each in content["categories"]], num_classes)
            rows: dict[int, list[tuple[float, ...]]] = {each: [] for each in images}
            for annotation in content["annotations"]:
                image, (left, top, width, height) = annotation["image_id"], map(float, annotation["bbox"])
                right, bottom, size = left + width, top + height, sizes[image]
                beyond = (-left, -top, right - size[0], bottom - size[1], -width, -height)
                if not all(distance <= _OUTSIDE_PX for distance in beyond):  # which not a number is not
                    what = f"annotation {annotation['id']}: the box {annotation['bbox']} is not inside its image"
                    raise DataError(f"{self._file}: {what} of {size[0]} x {size[1]} pixels")
                is_crowd = bool(annotation.get("iscrowd", 0))
                if not train or (not is_crowd and right > left and bottom > top):
                    rows[image].append((left, top, right, bottom, labels[annotation["category_id"]], is_crowd))
        numbers = [number for number in sorted(images) if rows[number] or not train]
        self._images = [(str(images[each]["file_name"]), sizes[each]) for each in numbers]
        self._boxes = [np.array(rows[each], np.float64).reshape(-1, 6) for each in numbers]

    def __len__(self) -> int:
        return len(self._images)

    def scene(self, index: int) -> Scene:
        """Return image ``index`` with its boxes; raises DataError where it cannot be read."""
        path = self.path(index)
        with opened_image(path) as file:
            image = file.convert("RGB")
        if image.size != (stated := self._images[index][1]):
            actual, expected = (f"{width} x {height}" for width, height in (image.size, stated))
            raise DataError(f"{path}: has {actual} pixels, {self._file} states {expected}: was it resized?")
        rows = self._boxes[index]
        limits = np.array([*image.size, *image.size])
        return Scene(image, np.clip(rows[:, :4], 0, limits), rows[:, 4].astype(np.int64), rows[:, 5].astype(np.int64))

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self._folder / self._images[index][0]

    def _labels(self, ids: Sequence[int], num_classes: int) -> Mapping[int, int]:
        if len(ids) == num_classes:
            return {each: label for label, each in enumerate(sorted(ids))}
        if not ids or min(ids) < 0 or max(ids) >= num_classes:
            has = f"{len(ids)} categories with ids up to {max(ids, default=0)}"
            raise DataError(f"{self._file}: has {has}; expected {num_classes} categories, or ids below {num_classes}")
        return {number: number for number in ids}


def centred(boxes: npt.NDArray[np.float64], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return boxes of corners in pixels as centre, width and height in parts of an image of ``size``."""
    low, high = boxes[:, :2] / size, boxes[:, 2:] / size
    return np.concatenate([(low + high) / 2, high - low], 1).astype(np.float32)


_SYNTHETIC_BOXES: Final = 8
_SCALES: Final = range(15, 26)
Labels = list[dict[str, Tensor]]


class Detector(ByteImageNetwork):
    """A detector of transformers for padded images of bytes."""

    def __init__(self, net: PreTrainedModel, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(net, mean, std)
        net.loss_function = FullPrecision(net.loss_function)

    def forward(self, image: Tensor, mask: Tensor, labels: Labels | None = None) -> dict[str, Tensor]:
        """Return ``logits`` and ``pred_boxes`` for each query, and with labels also ``loss``."""
        pixels = self.normalised(image) * mask[:, None]
        outputs = self.net(pixel_values=pixels, pixel_mask=mask, labels=labels)
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


def boxed_sample(
    scene_at: Callable[[int], Scene], change: Callable[[Scene, Uniform], Scene], index: int, random: torch.Generator
) -> Batch:
    """Return ``image``, ``mask``, ``count`` ``boxes`` with ``label`` and ``crowd``, ``size`` and ``index``.

    The boxes are in parts of the image, which ``change`` makes of the file's; ``size`` is the file's.
    """
    scene = scene_at(index)
    size = scene.image.size
    scene = change(scene, lambda: float(torch.rand((), generator=random, dtype=torch.float64)))
    pixels: npt.NDArray[np.uint8] = np.ascontiguousarray(np.array(scene.image).transpose(2, 0, 1))
    return {
        "image": torch.from_numpy(pixels),
        "mask": torch.ones(pixels.shape[1:], dtype=torch.uint8),
        "boxes": torch.from_numpy(centred(scene.boxes, scene.image.size)),
        "label": torch.from_numpy(scene.labels),
        "crowd": torch.from_numpy(scene.crowd),
        "count": torch.tensor(len(scene.labels)),
        "size": torch.tensor(size, dtype=torch.float32),
        "index": torch.tensor(index),
    }


class Detection(DenseTask):
    """Detection on COCO's layout; a case states the network, how images are changed, and how boxes are read out."""

    own_rate = ("backbone", 0.1)

    @abstractmethod
    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return a sample at the size for the model, in training at random."""

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, class and query of each detection, each of shape (batch, detections); here of each query."""
        return best_classes(logits)

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width of synthetic images."""
        return self.number("image_size"), self.number("image_size")

    def build_model(self) -> nn.Module:
        return Detector(self.network(), self.mean, self.std)

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the images with boxes of ``train2017``, or all of ``val2017``."""
        split = "train2017" if train else "val2017"
        images = BoxedImages(self.data_dirs[self.samples], split, num_classes=self.number("num_classes"), train=train)
        return ReadSamples(len(images), partial(boxed_sample, images.scene, partial(self.changed, train=train)))

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images with eight boxes each."""
        random = generator_for(self.place.seed)
        height, width = self.synthetic_size
        shape = size, _SYNTHETIC_BOXES
        sides = 0.1 + 0.2 * torch.rand(*shape, 2, generator=random)
        centres = 0.2 + 0.6 * torch.rand(*shape, 2, generator=random)
        return {
            "image": torch.randint(0, 256, (size, 3, height, width), generator=random, dtype=torch.uint8),
            "mask": torch.ones(size, height, width, dtype=torch.uint8),
            "boxes": torch.cat([centres, sides], 2),
            "label": torch.randint(0, self.number("num_classes"), shape, generator=random),
            "crowd": torch.zeros(shape, dtype=torch.int64),
            "count": torch.full((size,), _SYNTHETIC_BOXES),
            "size": torch.tensor([[width, height]] * size, dtype=torch.float32),
            "index": torch.arange(size),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's own loss, normalised by the boxes of the rank's batch; ``sum_of_outputs`` on meta."""
        if batch["image"].is_meta:
            return sum_of_outputs(model, batch["image"], batch["mask"])
        counts = batch["count"].tolist()
        labels = [
            {"class_labels": label[:count], "boxes": boxes[:count]}
            for label, boxes, count in zip_strict(batch["label"], batch["boxes"], counts)
        ]
        loss: Tensor = model(batch["image"], batch["mask"], labels)["loss"]
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the boxes of the images and those detected, in pixels of the files, as rows of ``box_precision``."""
        outputs = model(batch["image"], batch["mask"])
        score, label, query = self.scored(outputs["logits"].float())
        detected = torch.gather(outputs["pred_boxes"].float(), 1, query[:, :, None].expand(-1, -1, 4))
        return {"images": torch.ones_like(batch["index"]).sum(), **precision_rows(score, label, detected, batch)}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return ``map`` and ``map50``."""
        return box_precision(rows["boxes"], rows["detections"])


def detr(number: Callable[[str], int], *, auxiliary_loss: bool = False) -> transformers.DetrForObjectDetection:
    """Build DETR (Carion et al. 2020, arXiv:2005.12872) from named numbers."""
    blocks = [number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]
    config = transformers.DetrConfig(
        backbone_config=backbone_config(transformers.ResNetConfig, depths=blocks, out_features=["stage4"]),
        d_model=number("hidden_size"),
        encoder_layers=number("encoder_layers"),
        decoder_layers=number("decoder_layers"),
        num_queries=number("num_queries"),
        auxiliary_loss=auxiliary_loss,
    )
    config.num_labels = number("num_classes")
    with_padding(config)
    return transformers.DetrForObjectDetection(config)


class Detr(Detection):
    """A ResNet-50 with frozen normalization, and a Transformer that predicts a set of boxes."""

    backbone_name = "model.backbone.model"
    block_class = "GradientCheckpointingLayer"

    def network(self) -> PreTrainedModel:
        """Build DETR; the first convolution and stage are not trained."""
        net = detr(self.number, auxiliary_loss=True)
        backbone = self.with_weights(net)
        for name, parameter in backbone.named_parameters():  # transformers freezes all stages of its own ResNet
            parameter.requires_grad_("embedder" not in name and "stages.0." not in name)
        return net

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width between those of photographs with ratios of 4:3 and 3:2."""
        side = self.number("shorter_side")
        return side, round(1.42 * side)

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return one of 11 sizes, cropped or not and flipped or not; in evaluation the largest."""
        side, longest = self.number("shorter_side"), self.number("longer_side")
        return multi_scale(scene, side, longest, uniform) if train else scene.shorter(side, longest)


class RtDetr(Detection):
    """A ResNet-50-vd, a hybrid encoder, and a decoder whose queries are chosen among the encoder's outputs."""

    backbone_name = "model.backbone.model"
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def network(self) -> PreTrainedModel:
        """Build RT-DETR-R50 (Zhao et al. 2023, arXiv:2304.08069)."""
        width = self.number("hidden_size")
        config = transformers.RTDetrConfig(
            backbone_config=backbone_config(
                transformers.RTDetrResNetConfig,
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
        net = transformers.RTDetrForObjectDetection(config)
        self.with_weights(net)
        return net

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return a square, in training with other colours, crops and flips."""
        size = self.number("image_size")
        return distorted(scene, size, uniform) if train else scene.resized(size, size)

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Scale a batch to 15 to 25 20ths of ``image_size``, rounded down to multiples of 32."""
        part = _SCALES[int(torch.randint(len(_SCALES), (), generator=random))]
        side = self.number("image_size") * part // 20 // 32 * 32
        images = {"image": batch["image"], "mask": batch["mask"][:, None]}
        scaled = {name: F.interpolate(each.float(), size=(side, side)).to(torch.uint8) for name, each in images.items()}
        return {**batch, "image": scaled["image"], "mask": scaled["mask"][:, 0]}

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best pairs of query and class, whose probabilities are independent: as many as queries."""
        score, chosen = logits.sigmoid().flatten(1).topk(logits.shape[1])
        return score, chosen % logits.shape[2], chosen // logits.shape[2]


def best_classes(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return score, class and number of each query; the last logit is for none."""
    score, label = logits.softmax(2)[..., :-1].max(2)
    return score, label, label.new_ones(label.shape).cumsum(1) - 1


def precision_rows(score: Tensor, label: Tensor, detected: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return the ``boxes`` of a batch and its ``detections``, in pixels of the files, as ``box_precision`` takes them.

    ``score`` and ``label`` have the shape (images, detections); ``detected`` adds centre, width and height.
    """
    size, index = batch["size"], batch["index"][:, None].float()
    detections = [index.expand_as(score), *_pixels(detected, size), score, label.float()]
    truth = [index.expand_as(batch["crowd"]), *_pixels(batch["boxes"], size), batch["label"], batch["crowd"]]
    present = torch.arange(truth[0].shape[1], device=size.device) < batch["count"][:, None]
    return {
        "boxes": torch.stack([each[present].float() for each in truth], 1),
        "detections": torch.stack([detection.flatten() for detection in detections], 1),
    }


def _pixels(boxes: Tensor, size: Tensor) -> Sequence[Tensor]:
    """Return left, top, width and height in pixels, each of shape (batch, boxes)."""
    centre, sides = boxes[..., :2] * size[:, None], boxes[..., 2:] * size[:, None]
    return [*(centre - sides / 2).unbind(2), *sides.unbind(2)]
