"""Object detection by models of transformers that predict a set of boxes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.spec.backports import zip_strict
from accelmark.tasks.detection.data import BoxedImages, Scene, centred
from accelmark.tasks.images.data import MEAN, STD, Uniform
from accelmark.tasks.images.pytorch_imagenet import ByteImageNetwork, DenseTask, FullPrecision, sum_of_outputs
from accelmark.tasks.metrics import box_precision

_SYNTHETIC_BOXES: Final = 8
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


@final
class BoxedSamples:
    """Images of different sizes with boxes in parts of the image, and the sizes of the files for evaluation."""

    def __init__(self, count: int, scene: Callable[[int], Scene], change: Callable[[Scene, Uniform], Scene]) -> None:
        self._count, self._scene, self._change = count, scene, change

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``image``, ``mask``, ``count`` ``boxes`` with ``label`` and ``crowd``, ``size`` and ``index``."""
        scene = self._scene(index)
        size = scene.image.size
        scene = self._change(scene, lambda: float(torch.rand((), generator=random, dtype=torch.float64)))
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

    mean: ClassVar[Sequence[float]] = MEAN
    std: ClassVar[Sequence[float]] = STD
    """Of the channels, for values from 0 to 1."""
    own_rate = ("backbone", 0.1)
    scales: ClassVar[Sequence[int]] = ()
    """Sizes in 20ths of ``image_size``, rounded down to multiples of 32: one at random for each training batch."""
    independent_classes: ClassVar[bool] = False
    """Whether a query has a probability for each class; else for one of the classes or none."""

    @abstractmethod
    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return a sample at the size for the model, in training at random."""

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, class and query of each detection, each of shape (batch, detections).

        With independent classes these are as many best pairs of query and class as there are queries.
        """
        if not self.independent_classes:
            return best_classes(logits)
        score, chosen = logits.sigmoid().flatten(1).topk(logits.shape[1])
        return score, chosen % logits.shape[2], chosen // logits.shape[2]

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Scale a batch to one of ``scales``; empty: it is not changed."""
        if not self.scales:
            return batch
        part = self.scales[int(torch.randint(len(self.scales), (), generator=random))]
        side = self.number("image_size") * part // 20 // 32 * 32
        images = {"image": batch["image"], "mask": batch["mask"][:, None]}
        scaled = {name: F.interpolate(each.float(), size=(side, side)).to(torch.uint8) for name, each in images.items()}
        return {**batch, "image": scaled["image"], "mask": scaled["mask"][:, 0]}

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width of synthetic images."""
        return self.number("image_size"), self.number("image_size")

    def build_model(self) -> nn.Module:
        """Build the detector."""
        return Detector(self.network(), self.mean, self.std)

    def dataset(self, *, train: bool) -> BoxedSamples:
        """Return the images with boxes of ``train2017``, or all of ``val2017``."""
        split = "train2017" if train else "val2017"
        images = BoxedImages(self.data_dirs[self.samples], split, num_classes=self.number("num_classes"), train=train)
        return BoxedSamples(len(images), images.scene, partial(self.changed, train=train))

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
        return model(batch["image"], batch["mask"], labels)["loss"]

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the boxes of the images and those detected, in pixels of the files, as rows of ``box_precision``."""
        outputs = model(batch["image"], batch["mask"])
        score, label, query = self.scored(outputs["logits"].float())
        detected = torch.gather(outputs["pred_boxes"].float(), 1, query[:, :, None].expand(-1, -1, 4))
        return {"images": torch.ones_like(batch["index"]).sum(), **precision_rows(score, label, detected, batch)}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return ``map`` and ``map50``."""
        return box_precision(rows["boxes"], rows["detections"])


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
