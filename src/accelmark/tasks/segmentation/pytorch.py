"""Semantic segmentation: a class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelmark.datasets.images import opened_image
from accelmark.frameworks.pytorch.batches import ReadSamples, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import backbone_config, initial_net
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError
from accelmark.tasks.detection.pytorch import coloured, whole_number
from accelmark.tasks.images.data import Uniform
from accelmark.tasks.images.pytorch_imagenet import ByteImageNetwork, DenseTask, FullPrecision, sum_of_outputs
from accelmark.tasks.metrics import mean_overlap

_MOST_OF_ONE_CLASS: Final = 0.75
_TRIES: Final = 10
Segments = npt.NDArray[np.uint8]
"""Classes from 1; 0: not counted. Of shape (height, width)."""


class SegmentedImages:
    """The images ``images/<split>/*.jpg`` with their classes ``annotations/<split>/*.png``."""

    def __init__(self, directory: Path, split: str, *, num_classes: int) -> None:
        self._images = sorted((directory / "images" / split).glob("*.jpg"))
        self._annotations, self._num_classes = directory / "annotations" / split, num_classes
        if not self._images:
            raise DataError(f"{directory / 'images' / split}: expected *.jpg here, found none")
        present = {path.stem for path in self._annotations.glob("*.png")}
        if missing := next((path for path in self._images if path.stem not in present), None):
            raise DataError(f"{missing}: there is no {self._annotations / missing.stem}.png")

    def __len__(self) -> int:
        return len(self._images)

    def pair(self, index: int) -> tuple[Image.Image, Segments]:
        """Return image and classes; raises DataError where sizes differ or a class is not among ``num_classes``."""
        path = self._images[index]
        with opened_image(path) as file:
            image = file.convert("RGB")
        annotation = self._annotations / f"{path.stem}.png"
        with opened_image(annotation) as file:
            segments = np.array(file)
        if segments.shape != (image.height, image.width) or segments.max(initial=0) > self._num_classes:
            expected = f"expected ({image.height}, {image.width}) as {path.name}, and classes up to {self._num_classes}"
            raise DataError(f"{annotation}: has shape {segments.shape} and classes up to {segments.max()}; {expected}")
        return image, segments


def random_part(image: Image.Image, segments: Segments, uniform: Uniform, size: int) -> tuple[Image.Image, Segments]:
    """Return a square of ``size``, flipped and coloured at random, of the image at 0.5 to 2 times that shorter side.

    The square has at most 75 % of one class, if one of ten has; smaller images are filled up with class 0. As the
    recipes of SegFormer (arXiv:2105.15203, section 4.1) and Mask2Former (arXiv:2112.01527, section 4.3).
    """
    image = at_shorter_side(image, round(size * (0.5 + 1.5 * uniform())))
    segments = np.array(Image.fromarray(segments).resize(image.size, Image.Resampling.NEAREST))
    for _ in range(_TRIES):
        left = whole_number(0, max(0, image.width - size), uniform)
        top = whole_number(0, max(0, image.height - size), uniform)
        part = segments[top : top + size, left : left + size]
        counts = np.bincount(part[part > 0], minlength=2)
        if np.count_nonzero(counts) > 1 and counts.max() < _MOST_OF_ONE_CLASS * counts.sum():
            break
    image = image.crop((left, top, left + size, top + size))  # black beyond the edge
    padded = np.zeros((size, size), np.uint8)
    padded[: part.shape[0], : part.shape[1]] = part
    image = coloured(image, uniform)
    if uniform() < 0.5:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), np.ascontiguousarray(padded[:, ::-1])
    return image, padded


def at_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """Return the image with a shorter side of ``side`` pixels, and a longer one of at most four times as many."""
    scale = min(side / min(image.size), 4 * side / max(image.size))
    width, height = (max(1, round(each * scale)) for each in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


NOT_COUNTED: Final = -1
Change = Callable[[Image.Image, Segments, Uniform], tuple[Image.Image, Segments]]


class Segmenter(ByteImageNetwork):
    """A model of transformers for images of bytes."""

    def forward(self, image: Tensor, **labels: Any) -> Any:
        return self.net(pixel_values=self.normalised(image), **labels)


def segmented_sample(
    pair_at: Callable[[int], tuple[Image.Image, Segments]], change: Change, index: int, random: torch.Generator
) -> Batch:
    """Return ``image`` as ``change`` makes it, ``segments``, and the height and width of both in ``sizes``."""
    uniform = lambda: float(torch.rand((), generator=random, dtype=torch.float64))  # noqa: E731
    image, segments = change(*pair_at(index), uniform)
    sizes = [image.height, image.width, *segments.shape]
    pixels: npt.NDArray[np.uint8] = np.ascontiguousarray(np.array(image).transpose(2, 0, 1))
    return {"image": torch.from_numpy(pixels), "segments": torch.from_numpy(segments), "sizes": torch.tensor(sizes)}


class Segmentation(DenseTask):
    """Segmentation in ADE20K's layout; ``image_size`` and ``num_classes`` are under ``model``."""

    def build_model(self) -> nn.Module:
        return Segmenter(self.network(), self.mean, self.std)

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the images of ``training``, or of ``validation`` with classes at the size of the file."""
        split = "training" if train else "validation"
        images = SegmentedImages(self.data_dirs[self.samples], split, num_classes=self.number("num_classes"))
        size = self.number("image_size")

        def whole(image: Image.Image, segments: Segments, uniform: Uniform) -> tuple[Image.Image, Segments]:
            return at_shorter_side(image, size), segments

        change: Change = partial(random_part, size=size) if train else whole
        return ReadSamples(len(images), partial(segmented_sample, images.pair, change))

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
        logits: Tensor = model(image).logits
        return logits

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


class SegFormer(Segmentation):
    """A hierarchical Transformer from published weights, and a head of linear layers."""

    own_rate = ("decode_head", 10.0)
    block_class = "SegformerLayer"

    def network(self) -> PreTrainedModel:
        """Build SegFormer-B0 (Xie et al. 2021, arXiv:2105.15203) with the weights of its encoder."""
        width = self.number("hidden_size")
        config = transformers.SegformerConfig(
            depths=[self.number("stage_blocks")] * 4,
            hidden_sizes=[width, 2 * width, 5 * width, 8 * width],
            decoder_hidden_size=8 * width,
        )
        config.num_labels = self.number("num_classes")
        new, directory = ("decode_head",), self.data_dirs.get(self.weights)
        return initial_net(transformers.SegformerForSemanticSegmentation, config, directory, new=new)


class MaskClassification(Segmentation):
    """Segmentation by a model that predicts a set of masks with a class each: Mask2Former, or the case's."""

    backbone_name = "model.pixel_level_module.encoder"
    own_rate = (backbone_name, 0.1)
    block_class = "Mask2FormerMaskedAttentionDecoderLayer"

    def network(self) -> PreTrainedModel:
        """Build Mask2Former (Cheng et al. 2021, arXiv:2112.01527) for semantic segmentation."""
        width = self.number("hidden_size")
        config = transformers.Mask2FormerConfig(
            backbone_config=backbone_config(
                transformers.SwinConfig,
                embed_dim=self.number("backbone_width"),
                depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
                drop_path_rate=0.3,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=width,
            mask_feature_size=width,
            hidden_dim=width,
            encoder_layers=self.number("encoder_layers"),
            decoder_layers=self.number("decoder_layers") + 1,  # transformers counts the prediction before the first
            num_queries=self.number("num_queries"),
            train_num_points=self.number("num_points"),
            output_auxiliary_logits=True,
        )
        config.num_labels = self.number("num_classes")
        net = transformers.Mask2FormerForUniversalSegmentation(config)
        backbone = self.with_weights(net, new=("hidden_states_norms",))
        backbone.swin.layernorm.requires_grad_(False)  # whose output is not used
        return net

    def build_model(self) -> nn.Module:
        """Build the network on the default device, which some of its weights ignore."""
        net: Any = self.network()
        net.criterion = FullPrecision(net.criterion)
        return Segmenter(net.to(torch.get_default_device()), self.mean, self.std)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's own loss, normalised by the masks of the rank's batch; ``sum_of_outputs`` on meta."""
        if batch["image"].is_meta:
            return sum_of_outputs(model, batch["image"])
        present = [segments[segments > 0].unique() for segments in batch["segments"]]
        pairs = zip_strict(batch["segments"], present)
        masks = [(segments == classes[:, None, None]).float() for segments, classes in pairs]
        outputs = model(batch["image"], mask_labels=masks, class_labels=[classes.long() - 1 for classes in present])
        loss: Tensor = outputs.loss.sum()
        return loss

    def scores(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the sum over queries of class probability times mask."""
        outputs = model(image)
        classes = outputs.class_queries_logits.softmax(2)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", classes, outputs.masks_queries_logits.sigmoid())


def _at_size(scores: Tensor, size: Any) -> Tensor:
    return F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
