"""Training of image networks of transformers: ImageNet with augmentation as in recipes of timm, and images of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from accelmark.frameworks.pytorch.batches import TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import load_backbone
from accelmark.frameworks.pytorch.optimizers import build_optimizer, with_own_rate
from accelmark.spec.errors import RequestError
from accelmark.tasks.images.data import MEAN, MOST_NUMBERS, STD, FolderImages
from accelmark.tasks.images.pytorch import ImageClassification
from accelmark.train.loop.ends import scaled_learning_rate


class ByteImageNetwork(nn.Module):
    """A network of transformers behind images of uint8, which are normalised on the device; ``mean`` for 0 to 1."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: PreTrainedModel, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
        super().__init__()
        self.net: Any = net
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    def normalised(self, image: Tensor) -> Tensor:
        """Return images of shape (batch, 3, height, width) as floats with the mean 0 and the deviation 1."""
        return (image.float() - self.mean) / self.std


class DenseTask(TaskFamily):
    """A task whose network has a part, such as a pretrained backbone, with its own learning rate."""

    samples: ClassVar[str]
    """Name of the data set."""
    weights: ClassVar[str] = ""
    """Name of the data set with published weights."""
    backbone_name: ClassVar[str] = ""
    """Name of the part that starts from published weights; empty: all of the network."""
    mean: ClassVar[Sequence[float]] = MEAN
    std: ClassVar[Sequence[float]] = STD
    """Of the channels, for values from 0 to 1."""
    own_rate: ClassVar[tuple[str, float]]
    """A part of the names of weights, between dots, and the factor of their learning rate."""

    @abstractmethod
    def network(self) -> PreTrainedModel:
        """Return the network with its initial weights."""

    def backbone(self, net: nn.Module) -> Any:
        """Return the part of the network that starts from published weights."""
        return net.get_submodule(self.backbone_name)

    def with_weights(self, net: nn.Module, *, new: Sequence[str] = ()) -> Any:
        """Return that part, with its weights where there is data; ``new`` is that of :func:`load_backbone`."""
        backbone = self.backbone(net)
        load_backbone(backbone, self.data_dirs.get(self.weights), new=new)
        return backbone

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, with ``own_rate``."""
        optimizer = build_optimizer(model, self.settings.optimizer, self.place.device)
        return with_own_rate(optimizer, model, *self.own_rate)


class FullPrecision(nn.Module):
    """A function of tensors that computes in fp32 within autocast, too: boxes in half precision are off by pixels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the function with floating-point tensors in fp32."""
        device = next(leaf.device for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor))
        with torch.autocast(device.type, enabled=False):
            wide = lambda each: each.float() if each.is_floating_point() else each  # noqa: E731
            inputs, named = tree_map_only(Tensor, wide, (inputs, named))
            return self.function(*inputs, **named)


def sum_of_outputs(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Return a sum for counting a model's operations on the meta device, where no values can be compared.

    The losses, which assign predictions to objects, have no counted operations.
    """
    leaves = [each for each in tree_leaves(model.eval()(*inputs)) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


_TOP: Final = 10.0
"""Largest magnitude."""
_PROBABILITY: Final = 0.5
"""Of each operation, and of CutMix instead of mixup."""
_ERASED_AREA: Final = (0.02, 1 / 3)
_ERASED_RATIO: Final = (0.3, 3.3)
_TRIES: Final = 10
Operation = Callable[[Image.Image, float, float], Image.Image]
"""Changes an image by a magnitude from 0 to 1 and a sign."""


def _moved(image: Image.Image, matrix: tuple[float, float, float, float, float, float]) -> Image.Image:
    grey = (124, 116, 104)  # the mean of ImageNet
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=grey)


OPERATIONS: Final[Mapping[str, Operation]] = {
    "autocontrast": lambda image, size, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, size, sign: ImageOps.equalize(image),
    "invert": lambda image, size, sign: ImageOps.invert(image),
    "rotate": lambda image, size, sign: image.rotate(
        30 * size * sign, Image.Resampling.BILINEAR, fillcolor=(124, 116, 104)
    ),
    "posterize": lambda image, size, sign: ImageOps.posterize(image, max(1, 4 - int(4 * size))),
    "solarize": lambda image, size, sign: ImageOps.solarize(image, 256 - int(256 * size)),
    "solarize_add": lambda image, size, sign: image.point(
        [min(255, value + int(110 * size)) if value < 128 else value for value in range(256)] * 3
    ),
    "color": lambda image, size, sign: ImageEnhance.Color(image).enhance(1 + 0.9 * size * sign),
    "contrast": lambda image, size, sign: ImageEnhance.Contrast(image).enhance(1 + 0.9 * size * sign),
    "brightness": lambda image, size, sign: ImageEnhance.Brightness(image).enhance(1 + 0.9 * size * sign),
    "sharpness": lambda image, size, sign: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * size * sign),
    "shear_x": lambda image, size, sign: _moved(image, (1, 0.3 * size * sign, 0, 0, 1, 0)),
    "shear_y": lambda image, size, sign: _moved(image, (1, 0, 0, 0.3 * size * sign, 1, 0)),
    "translate_x": lambda image, size, sign: _moved(image, (1, 0, 0.45 * size * sign * image.width, 0, 1, 0)),
    "translate_y": lambda image, size, sign: _moved(image, (1, 0, 0, 0, 1, 0.45 * size * sign * image.height)),
}
"""The operations of timm's ``rand-...-inc1``, whose effect grows with the magnitude."""


def rand_augment(image: Image.Image, magnitude: float, random: torch.Generator) -> Image.Image:
    """Apply two random operations (Cubuk et al. 2019, arXiv:1909.13719), as timm's ``rand-m<magnitude>-mstd0.5-inc1``.

    Each is applied with probability 0.5, at a magnitude of 0 to 10 that varies normally by 0.5.
    """
    draws = np.random.default_rng(random.initial_seed())
    for name in draws.choice(list(OPERATIONS), 2):
        size = float(np.clip(draws.normal(magnitude, 0.5), 0, _TOP)) / _TOP
        sign = 1.0 if draws.random() < 0.5 else -1.0
        if draws.random() < _PROBABILITY:
            image = OPERATIONS[str(name)](image, size, sign)
    return image


def erase(image: Tensor, probability: float, random: torch.Generator) -> Tensor:
    """Replace a random rectangle by noise (Zhong et al. 2017, arXiv:1708.04896), as timm's ``pixel`` mode; uint8."""
    draws = np.random.default_rng([random.initial_seed(), 1])
    if draws.random() >= probability:
        return image
    channels, height, width = image.shape
    for _ in range(_TRIES):
        area = height * width * draws.uniform(*_ERASED_AREA)
        ratio = np.exp(draws.uniform(*np.log(_ERASED_RATIO)))
        down, across = round(float(np.sqrt(area * ratio))), round(float(np.sqrt(area / ratio)))
        if down < height and across < width:
            top, left = int(draws.integers(height - down + 1)), int(draws.integers(width - across + 1))
            noise = np.clip(draws.normal(115, 58, (channels, down, across)), 0, 255).astype(np.uint8)
            image = image.clone()
            image[:, top : top + down, left : left + across] = torch.from_numpy(noise)
            return image
    return image


def mixed(
    batch: Mapping[str, Tensor], mixup_alpha: float, cutmix_alpha: float, random: torch.Generator
) -> dict[str, Tensor]:
    """Mix each image of a batch with that at the opposite position, by mixup or CutMix (half of the batches each).

    Returns ``image``, ``label``, the other image's ``other_label``, and ``share``, the weight of ``label``
    (Zhang et al. 2017, arXiv:1710.09412; Yun et al. 2019, arXiv:1905.04899).
    """
    draws = np.random.default_rng(random.initial_seed())
    image, other = batch["image"], batch["image"].flip(0)
    if draws.random() < _PROBABILITY:
        share = float(draws.beta(cutmix_alpha, cutmix_alpha))
        height, width = image.shape[2:]
        rows, columns = (_span(size, float(np.sqrt(1 - share)), draws) for size in (height, width))
        image = image.clone()
        image[:, :, rows, columns] = other[:, :, rows, columns]
        share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    else:
        share = float(draws.beta(mixup_alpha, mixup_alpha))
        image = (image.float() * share + other.float() * (1 - share)).round().to(torch.uint8)
    weights = torch.full((len(image),), share)
    return {"image": image, "label": batch["label"], "other_label": batch["label"].flip(0), "share": weights}


def _span(size: int, part: float, draws: np.random.Generator) -> slice:
    """Return a span of ``part`` of ``size`` around a random centre, cut off at the edges."""
    centre, half = int(draws.integers(size)), int(size * part) // 2
    return slice(max(0, centre - half), min(size, centre + half))


class ImageFolder(FolderImages):
    """The images of one split, with random numbers of PyTorch; in training also with RandAugment and random erasing."""

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        train: bool,
        rand_magnitude: float = 0.0,
        erase_probability: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(directory, split, train=train, **options)
        self._rand_magnitude, self._erase_probability = rand_magnitude * train, erase_probability * train

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``image``, uint8 of shape (3, size, size), and ``label``."""
        alter = partial(rand_augment, magnitude=self._rand_magnitude, random=random) if self._rand_magnitude else None
        numbers = iter(torch.rand(MOST_NUMBERS, generator=random, dtype=torch.float64).tolist())
        sample = self.sample(index, lambda: next(numbers), alter)
        image = torch.from_numpy(sample["image"])
        if self._erase_probability:
            image = erase(image, self._erase_probability, random)
        return {"image": image, "label": torch.from_numpy(sample["label"])}


class Normalized(ByteImageNetwork):
    """An image classifier of transformers for images of bytes."""

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.net(self.normalised(image)).logits
        return logits


class ImageNetwork(ABC):
    """A case whose network is a class of transformers, in the size of the case's numbers."""

    network_class: ClassVar[str]
    """Class of transformers."""
    arguments: ClassVar[Mapping[str, str | Sequence[str]]] = {}
    """Argument of the network's configuration -> number of the case, or several; those in per cent are divided."""
    config_values: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the configuration."""

    @abstractmethod
    def number(self, name: str) -> int:
        """Return one of the case's own whole numbers."""

    def network(self) -> PreTrainedModel:
        """Return a network whose output for normalised images has ``logits`` of ``num_classes``."""
        values = {argument: self._value(names) for argument, names in self.arguments.items()}
        network_class: Any = getattr(transformers, self.network_class)
        config = network_class.config_class(**values, **self.config_values)
        config.num_labels = self.number("num_classes")
        net: PreTrainedModel = network_class(config)
        return net

    def _value(self, names: str | Sequence[str]) -> Any:
        if not isinstance(names, str):
            return [self.number(name) for name in names]
        return self.number(names) / 100 if names.endswith("_percent") else self.number(names)


class ScaledRate(TaskFamily):
    """Training for which ``optimizer.lr`` is the learning rate of a global batch of ``model.lr_batch_size``."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Scale the learning rate by global batch / ``lr_batch_size``."""
        rate = scaled_learning_rate(self.settings, self.place.world_size, self.number("lr_batch_size"))
        return build_optimizer(model, self.settings.optimizer.model_copy(update={"lr": rate}), self.place.device)


class ImageNetTraining(ScaledRate, ImageClassification, ImageNetwork):
    """Image classification on ImageNet; a case states the network.

    The settings ``image_size`` and ``num_classes`` are under ``model``. Optional are ``rand_magnitude``,
    ``erase_probability``, ``mixup_alpha`` with ``cutmix_alpha``, and ``label_smoothing``.
    """

    accuracies: ClassVar = {"top1": 1, "top5": 5}
    samples: ClassVar[str]
    """Name of the data set."""

    def build_model(self) -> nn.Module:
        """Build the network with random weights. Raises RequestError: it would not have the stages of the settings."""
        is_own = type(self).network is not ImageNetwork.network
        if "stage1_blocks" in self.settings.model and "depths" not in self.arguments and not is_own:
            raise RequestError("model.stage1_blocks has no effect: state depths: [stage1_blocks, ...] in arguments")
        return Normalized(self.network())

    def dataset(self, *, train: bool) -> ImageFolder:
        """Return random resized crops of ``train``, flipped with probability 0.5, or centre crops of ``val``."""
        return ImageFolder(
            self.data_dirs[self.samples],
            "train" if train else "val",
            num_classes=self.num_classes,
            size=self.number("image_size"),
            train=train,
            draft=bool(self.settings.model.get("jpeg_draft")),
            rand_magnitude=self._option("rand_magnitude"),
            erase_probability=self._option("erase_probability"),
        )

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Mix the images of a batch where the settings ask for it."""
        if not self._option("mixup_alpha"):
            return batch
        return mixed(batch, self._option("mixup_alpha"), self._option("cutmix_alpha"), random)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images and labels, mixed as those that are read."""
        return self.augment(dict(super().synthetic_batch(size)), generator_for(self.place.seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the smoothed labels, of mixed images weighted by their shares."""
        logits: Tensor = model(batch["image"])
        smoothing = self._option("label_smoothing")
        if "share" not in batch:
            return F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
        first, second = (
            F.cross_entropy(logits, batch[name], label_smoothing=smoothing, reduction="none")
            for name in ("label", "other_label")
        )
        return (first * batch["share"] + second * (1 - batch["share"])).mean()

    def _option(self, name: str) -> float:
        """Return one of the case's own numbers, 0 where it has none."""
        return float(self.settings.model.get(name) or 0)


class EfficientNet(ImageNetTraining):
    """EfficientNet with dropout and stochastic depth of 0.2."""

    def network(self) -> PreTrainedModel:
        """Build EfficientNet; open runs may change width and depth, in per cent of B0's."""
        width = self.number("width_percent")
        config = transformers.EfficientNetConfig(
            image_size=self.number("image_size"),
            width_coefficient=width / 100,
            depth_coefficient=self.number("depth_percent") / 100,
            hidden_dim=1280 * width // 100,
            dropout_rate=0.2,
            drop_connect_rate=0.2,
        )
        config.num_labels = self.num_classes
        net = transformers.EfficientNetForImageClassification(config)
        # transformers draws the scales of normalization near zero, for published weights that replace them: no gradient
        # reaches the first layers. These are the authors' initial weights (Tan and Le 2019, arXiv:1905.11946), whose
        # momentum of 0.99 is 0.01 in PyTorch's definition.
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                module.momentum = 0.01
        return net
