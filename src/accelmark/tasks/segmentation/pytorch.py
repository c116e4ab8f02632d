"""Semantic segmentation: a class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.spec.backports import zip_strict
from accelmark.tasks.images.data import Uniform
from accelmark.tasks.images.pytorch_imagenet import ByteImageNetwork, DenseTask, FullPrecision, sum_of_outputs
from accelmark.tasks.metrics import mean_overlap
from accelmark.tasks.segmentation.data import SegmentedImages, Segments, at_shorter_side, random_part

NOT_COUNTED: Final = -1
Change = Callable[[Image.Image, Segments, Uniform], tuple[Image.Image, Segments]]


class Segmenter(ByteImageNetwork):
    """A model of transformers for images of bytes."""

    def forward(self, image: Tensor, **labels: Any) -> Any:
        """Return the network's output."""
        return self.net(pixel_values=self.normalised(image), **labels)


@final
class SegmentedSamples:
    """Images as they are for the model, and in evaluation classes at the size of the file."""

    def __init__(self, count: int, pair: Callable[[int], tuple[Image.Image, Segments]], change: Change) -> None:
        self._count, self._pair, self._change = count, pair, change

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``image``, ``segments`` and the height and width of both in ``sizes``."""
        uniform = lambda: float(torch.rand((), generator=random, dtype=torch.float64))  # noqa: E731
        image, segments = self._change(*self._pair(index), uniform)
        sizes = [image.height, image.width, *segments.shape]
        pixels: npt.NDArray[np.uint8] = np.ascontiguousarray(np.array(image).transpose(2, 0, 1))
        return {"image": torch.from_numpy(pixels), "segments": torch.from_numpy(segments), "sizes": torch.tensor(sizes)}


class Segmentation(DenseTask):
    """Segmentation in ADE20K's layout; ``image_size`` and ``num_classes`` are under ``model``."""

    def build_model(self) -> nn.Module:
        """Build the network."""
        return Segmenter(self.network())

    def dataset(self, *, train: bool) -> SegmentedSamples:
        """Return the images of ``training`` or of ``validation``."""
        split = "training" if train else "validation"
        images = SegmentedImages(self.data_dirs[self.samples], split, num_classes=self.number("num_classes"))
        size = self.number("image_size")
        if train:
            return SegmentedSamples(len(images), images.pair, partial(random_part, size=size))
        return SegmentedSamples(
            len(images), images.pair, lambda image, segments, _: (at_shorter_side(image, size), segments)
        )

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images, whose classes change every 32 pixels."""
        random = generator_for(self.place.seed)
        side = self.number("image_size")
        coarse = torch.randint(1, self.number("num_classes") + 1, (size, side // 32, side // 32), generator=random)
        return {
            "image": torch.randint(0, 256, (size, 3, side, side), generator=random, dtype=torch.uint8),
            "segments": coarse.repeat_interleave(32, 1).repeat_interleave(32, 2).to(torch.uint8),
            "sizes": torch.tensor([[side] * 4] * size),
        }

    def scores(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return a score for each class and pixel, of shape (batch, classes, any height, any width)."""
        return model(image).logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a pixel, with the logits at the size of the image."""
        target = batch["segments"].long() + NOT_COUNTED
        logits = _at_size(self.scores(model, batch["image"]).float(), target.shape[1:])
        # With no counted pixel in the batch the mean would not be a number.
        total = F.cross_entropy(logits, target, ignore_index=NOT_COUNTED, reduction="sum")
        return total / (target != NOT_COUNTED).sum().clamp(min=1)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return for each image and class the common, the true and the predicted pixels, at the file's size."""
        scores, number = self.scores(model, batch["image"]).float(), self.number("num_classes")
        rows = []
        for image, segments, sizes in zip_strict(scores, batch["segments"], batch["sizes"].tolist()):
            height, width, *whole = sizes
            visible = _at_size(image[None], batch["image"].shape[2:])[:, :, :height, :width]
            labels = _at_size(visible, whole)[0].argmax(0) + 1
            truth = segments[: whole[0], : whole[1]].long()
            labels, truth = labels[truth > 0], truth[truth > 0]
            parts = (truth[labels == truth], truth, labels)
            counts = [torch.bincount(part, minlength=number + 1)[1:] for part in parts]
            rows.append(torch.stack([torch.arange(number, device=labels.device), *counts], 1))
        return {"images": torch.tensor(len(rows)), "segments": torch.cat(rows)}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return ``miou`` and ``pixel_accuracy``."""
        return mean_overlap(rows["segments"])


class MaskClassification(Segmentation):
    """Segmentation by models of transformers that predict a set of masks with a class each, such as MaskFormer's."""

    backbone_name = "model.pixel_level_module.encoder"
    own_rate = (backbone_name, 0.1)

    def build_model(self) -> nn.Module:
        """Build the network on the default device, which some of its weights ignore."""
        net: Any = self.network()
        net.criterion = FullPrecision(net.criterion)
        return Segmenter(net.to(torch.get_default_device()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's own loss, normalised by the masks of the rank's batch; ``sum_of_outputs`` on meta."""
        if batch["image"].is_meta:
            return sum_of_outputs(model, batch["image"])
        present = [segments[segments > 0].unique() for segments in batch["segments"]]
        pairs = zip_strict(batch["segments"], present)
        masks = [(segments == classes[:, None, None]).float() for segments, classes in pairs]
        outputs = model(batch["image"], mask_labels=masks, class_labels=[classes.long() - 1 for classes in present])
        return outputs.loss.sum()

    def scores(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the sum over queries of class probability times mask."""
        outputs = model(image)
        classes = outputs.class_queries_logits.softmax(2)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", classes, outputs.masks_queries_logits.sigmoid())


def _at_size(scores: Tensor, size: Any) -> Tensor:
    return F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
