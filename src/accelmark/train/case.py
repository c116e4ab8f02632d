"""The interface of a training case whose data are NumPy arrays, its layers ``nn``, and its FLOPs by formula.

A process trains in one framework. Its backend selects the framework's layers before it imports the case.

FLOPs: a multiply-add is two operations; backward is twice forward, because a matrix product has two gradients. Only
matrix products and convolutions count, as in FLOP counters and in the PaLM paper (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token). Recomputation by activation checkpointing never counts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import RequestError, nearest, raising
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import FolderRef, folder_module
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.inference import CaseClass
from accelmark.spec.settings.training import Scalar, TrainSettings
from accelmark.train.batches import ArrayPlace, Arrays, ArraySource, Batches, DataSetCase, SampleBatches, WholeBatches

CaseT = TypeVar("CaseT")


def case_class(folder: FolderRef, framework: str, base: type[CaseT]) -> type[CaseT]:
    """Return ``Case`` of ``<framework>.py``, else the class that ``case.yaml`` declares, else that of ``arrays.py``."""
    if not folder.path.is_dir():
        raise RequestError(f"{folder.path}: the folder of the case does not exist any more; train in this checkout")
    is_own = (folder.path / f"{framework}.py").is_file()
    case, where = (None, "") if is_own else declared_class(folder.path, "train", framework, "accelmark.tasks")
    if case is None:
        module = folder_module(folder, framework if is_own else "arrays")
        case, where = getattr(module, "Case", None), str(module.__file__)
    if not (isinstance(case, type) and issubclass(case, base)):
        raise RequestError(f"{where}: has no class Case({base.__module__}.{base.__qualname__})")
    own = [name for name in ("metrics", "row_metrics") if getattr(case, name, None) is not getattr(base, name, None)]
    if not own and not getattr(case, "ratios", None):
        raise RequestError(f"{where}: {case.__name__} has neither metrics() nor ratios")
    return case


def declared_class(folder: Path, side: str, framework: str, package: str) -> tuple[Any, str]:
    """Return the class that ``case.yaml`` declares for its side ``train`` or ``infer``, and where; None: it does not.

    ``package`` is what bases are below. Raises RequestError: the base lacks an attribute.
    """
    file = folder / "case.yaml"
    classes = (read_yaml(file).get(side) or {}).get("classes") or {} if file.is_file() else {}
    if framework not in classes:
        return None, ""
    declared = parse(CaseClass, classes[framework], str(file))
    module_name, _, name = declared.base.rpartition(".")
    family: type[Any] = getattr(import_module(f"{package}.{module_name}"), name)
    known = {name for kind in family.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    if unknown := sorted(declared.attributes.keys() - known):
        hint = nearest(unknown[0], known)
        raise RequestError(f"{file}: {declared.base} has no attribute {unknown[0]!r} ({hint})")
    return type("Case", (family,), dict(declared.attributes)), f"{file}: {side}.classes.{framework}"


_DIMENSIONS: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Size of a Transformer under ``model`` -> argument of most of transformers' configurations."""


class ModelSettings:
    """The case's own settings (``settings.model``)."""

    settings: TrainSettings
    ratios: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Metric -> two sums over all batches, whose ratio it is."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn the added-up sums into metrics, by default ``ratios``; one has the name of the target's metric."""
        return {name: sums[above] / sums[below] for name, (above, below) in self.ratios.items()}

    def number(self, name: str) -> int:
        """Return one of the case's own integer settings."""
        value: Scalar = self.settings.model[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"model.{name} is {value!r}, not a whole number")
        return value

    def real(self, name: str) -> float:
        """Return one of the case's own numbers."""
        value: Scalar = self.settings.model[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"model.{name} is {value!r}, not a number")
        return float(value)

    def dimensions(self, **names: str) -> dict[str, Any]:
        """Return the sizes of a Transformer as arguments of a configuration, renamed as ``hidden_size="d_model"``."""
        return {
            names.get(name, usual): self.number(name)
            for name, usual in _DIMENSIONS.items()
            if name in self.settings.model
        }

    def numbers(self, name: str) -> list[int]:
        """Return one of the case's own settings that lists whole numbers. Raises RequestError: it is no such list."""
        with raising(RequestError, f"model.{name} is not whole numbers with commas between them", ValueError):
            return [int(part) for part in str(self.settings.model[name]).split(",")]


Batch = Mapping[str, Any]
"""Named tensors with the samples along the first dimension."""


class ArrayCase(DataSetCase, ModelSettings, ABC):
    """A standard workload on NumPy arrays: subclass it as ``Case`` in ``cases/<model>/<framework>.py``.

    The driver owns the loop, precision, parallelism, logging, timing, checkpoints and the end of training. ``loss`` and
    ``eval_sums`` are traced and compiled: they compute with tensors and have no side effects but those of layers.
    """

    reference_names: ClassVar[Mapping[str, str]] = {}
    """Regular expression -> replacement: applied in order, they turn the names of this model's weights into those of
    the case in PyTorch."""

    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: RankPlace) -> None:
        self.settings = settings
        self.data_dirs = data_dirs
        self.place = place

    @property
    def sizes(self) -> dict[str, int]:
        """The case's own integer settings."""
        numbers = self.settings.model.items()
        return {name: value for name, value in numbers if isinstance(value, int) and not isinstance(value, bool)}

    def _batches(self, data: Arrays | ArraySource, size: int, *, train: bool) -> Batches:
        place = ArrayPlace(self.place.rank, self.place.world_size, self.settings.seed)
        if isinstance(data, Mapping):
            return WholeBatches(data, size, place, train=train, augment=self.augment if train else None)
        return SampleBatches(data, size, place, self.settings.loader, train=train)

    @property
    def random(self) -> np.random.Generator:
        """A new generator of this rank's synthetic data."""
        return np.random.default_rng((self.settings.seed, self.place.rank))

    @abstractmethod
    def build_model(self) -> Any:
        """Return the model with its initial weights in float32; called with the same seed on every rank."""

    def initial_weights(self) -> tuple[Path, Mapping[str, Any]] | None:
        """Return a checkpoint and its arrays by the names of the case in PyTorch; None: weights are random."""
        return None

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean loss over the batch, a float32 scalar, by one call of ``model``."""

    @abstractmethod
    def eval_sums(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""

    @abstractmethod
    def synthetic_batch(self, size: int) -> Arrays:
        """Return a synthetic batch of ``size`` samples with the shapes, types and value ranges of real data."""

    def peak_learning_rate(self) -> float:
        """Return the learning rate by which the schedule is multiplied."""
        return self.settings.optimizer.lr

    def flops_per_sample(self) -> float | None:
        """Return forward and backward FLOPs of one sample by formula; or None."""
        return None


nn: Any
"""``layers.py`` of the framework's folder: layers with the names and the meaning of PyTorch's.

A model is an ``nn.Module`` with ``forward``; blocks whose activations can be recomputed set ``is_block``. Images are in
the framework's own layout behind ``nn.Normalize``. Layers take their initial weights from ``nn.normal(std)``,
``nn.uniform``, ``nn.normal_fan_out`` or ``nn.zeros``. Dropout draws numbers that depend on seed, rank, step and layer
only.
"""
IGNORED: Final = -100
"""Label of a position that is not predicted."""
Weights = npt.NDArray[np.float32]
Initial = Callable[[np.random.Generator, tuple[int, ...], int, int], Weights]
"""Returns initial weights of a shape, by the number of inputs of each output and of outputs of each input."""


def use_layers(layers: ModuleType) -> None:
    """Select the layers of a framework."""
    global nn
    nn = layers


def zeros(random: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Weights:
    """Return zeros."""
    return np.zeros(shape, np.float32)


def uniform(random: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Weights:
    """Return PyTorch's initial weights of convolutions and linear layers: uniform up to 1 / sqrt(fan_in)."""
    return random.uniform(-(fan_in**-0.5), fan_in**-0.5, shape).astype(np.float32)


def normal(std: float) -> Initial:
    """Return normal initial weights."""
    return lambda random, shape, fan_in, fan_out: (std * random.standard_normal(shape)).astype(np.float32)


def normal_fan_out(random: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Weights:
    """Return normal initial weights of convolutions before ReLU (He et al. 2015, arXiv:1502.01852)."""
    return normal(math.sqrt(2 / fan_out))(random, shape, fan_in, fan_out)


def rotary_angles(width: int, length: int) -> tuple[Weights, Weights]:
    """Return cosine and sine of rotary embeddings (Su et al. 2021, arXiv:2104.09864), of shape (length, 1, width).

    The sine of the first half is negative: ``x * cos + roll(x, width // 2) * sin`` rotates ``x``.
    """
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(length), rates)[:, None].astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1)


def dense_flops(num_weights: int, num_vectors: int) -> float:
    """Return the FLOPs of multiplying ``num_vectors`` (tokens of a sample) by ``num_weights`` matrix weights."""
    return 6.0 * num_weights * num_vectors


def attention_flops(num_layers: int, hidden_size: int, length: int) -> float:
    """Return the FLOPs of the score and value products of a sequence.

    Two products of ``length`` x ``length`` x ``hidden_size`` a layer. A causal mask does not reduce them, by the
    convention of the PaLM paper, the FLOP counter and published MFU figures.
    """
    return 12.0 * num_layers * hidden_size * length * length


def encoder_flops(model: Mapping[str, Any]) -> float:
    """Return the FLOPs of an encoder's layers over all tokens, including padding, by the settings of its case."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    weights = layers * (4 * hidden * hidden + 2 * hidden * model["intermediate_size"])
    return dense_flops(weights, length) + attention_flops(layers, hidden, length)


def decoder_flops(model: Mapping[str, Any], feed: float) -> float:
    """Return the FLOPs of a decoder by its case's settings; ``feed``: active weights of a layer's feed-forward part."""
    hidden, length, layers, heads = (model[name] for name in ("hidden_size", "seq_length", "num_layers", "num_heads"))
    width = model.get("head_dim", hidden // heads)
    attention = 2 * hidden * width * (heads + model.get("num_kv_heads", heads))
    weights = layers * (attention + feed) + hidden * model["vocab_size"]
    return dense_flops(weights, length) + attention_flops(layers, heads * width, length)


def conv_flops(size: int, kernel: int, channels_in: int, channels_out: int, *, is_first: bool = False) -> float:
    """Return the FLOPs of a square convolution for one image, by the sides of output and kernel.

    The input of the first one is the image, which needs no gradient, so that its backward pass has only one product.
    """
    return 2.0 * size**2 * kernel**2 * channels_in * channels_out * (2 if is_first else 3)
