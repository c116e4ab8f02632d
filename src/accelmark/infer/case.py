"""The interface of an inference case in PyTorch, and its data in batches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accelmark.infer.engine import as_list
from accelmark.infer.onnx_files import export_onnx
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.training import Scalar
from accelmark.tasks.metrics import IGNORED


class InferBatch(NamedTuple):
    """Items of one call: the model's inputs in order, on the CPU, items along the first dimension."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None

    @property
    def num_items(self) -> int:
        """Items in this batch."""
        return int(self.inputs[0].shape[0])

    def pinned(self) -> InferBatch:
        """Return the batch with inputs in page-locked memory, for asynchronous copies to the device."""
        return InferBatch(tuple(tensor.pin_memory() for tensor in self.inputs), self.labels)


class InferBatches(Protocol):
    """The labelled data of a case, in batches of ``settings.batch_size``; the last one may be smaller."""

    @property
    def num_items(self) -> int:
        """Items of one pass."""

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass over the data, in the same order each time."""


class InMemoryBatches:
    """A data set in memory, as tensors."""

    def __init__(self, inputs: Sequence[Tensor], labels: Tensor, batch_size: int) -> None:
        self.inputs, self.labels, self.batch_size = inputs, labels, batch_size
        self.num_items = len(labels)

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass; every batch is a copy, as with a data loader."""
        for start in range(0, self.num_items, self.batch_size):
            part = slice(start, start + self.batch_size)
            yield InferBatch(tuple(tensor[part].clone() for tensor in self.inputs), self.labels[part])


class LoaderBatches:
    """A data set of (input, ..., label), read item by item, in worker processes if ``num_workers`` is positive."""

    def __init__(self, dataset: Dataset[Any], settings: InferSettings) -> None:
        self.num_items = len(dataset)  # type: ignore[arg-type] # a map-style data set has a length
        self.loader: DataLoader[InferBatch] = DataLoader(
            dataset,
            batch_size=settings.batch_size,
            num_workers=settings.num_workers,
            collate_fn=_collate,
            persistent_workers=settings.num_workers > 0,
        )

    def __iter__(self) -> Iterator[InferBatch]:
        return iter(self.loader)


def _collate(samples: Sequence[tuple[Any, ...]]) -> InferBatch:
    *inputs, labels = zip_strict(*samples)
    return InferBatch(
        tuple(torch.stack(column) for column in inputs), torch.stack([torch.as_tensor(label) for label in labels])
    )


@dataclass(frozen=True)
class DerivedBatches:
    """Batches that a function yields at each pass."""

    num_items: int
    start: Callable[[], Iterable[InferBatch]]

    def __iter__(self) -> Iterator[InferBatch]:
        return iter(self.start())


class InferCase(ABC):
    """An inference workload: subclass it as ``Case`` in ``cases/<model>/infer_pytorch.py``.

    AccelMark handles steps, precision, devices, timing and logging; a case never moves a model or measures time.
    """

    input_names: ClassVar[tuple[str, ...]] = ("input",)
    """Names of the inputs in the ONNX file."""
    output_names: ClassVar[tuple[str, ...]] = ("output",)
    trained: bool = True
    """Whether ``create_model`` loads trained weights; a case without them sets it False in ``__init__``. The run then
    measures speed only."""
    partial: bool = False
    """Set by ``build_dataloader`` where the data is a subset or a substitute: its accuracy is only a sanity check."""

    def __init__(
        self, settings: InferSettings, parameters: Mapping[str, Scalar], data_dirs: Mapping[str, Path]
    ) -> None:
        self.settings = settings
        self.parameters = parameters
        self.data_dirs = data_dirs

    def number(self, name: str) -> int:
        """Return an integer parameter of the case."""
        value = self.parameters[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"parameters.{name} is {value!r}, not an integer")
        return value

    def data_dir(self, name: str, content: str) -> Path:
        """Return the directory of a data set, which holds ``content``. Raises DataError: it was not given."""
        if name not in self.data_dirs:
            raise DataError(
                f"{name} is not here: name a directory that holds {content} (--data DIR), or measure speed only with "
                "synthetic data (--synthetic)"
            )
        return self.data_dirs[name]

    @abstractmethod
    def build_dataloader(self) -> InferBatches:
        """Return the labelled data. Raises DataError: it is missing, empty, or in the wrong layout."""

    @abstractmethod
    def create_model(self) -> nn.Module:
        """Return the model on the CPU in fp32; its forward takes and returns plain tensors."""

    @abstractmethod
    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float | Tensor]:
        """Return sums over one batch (``correct``, ``count``) that are added over batches; tensors are on the CPU.

        A tensor has a row for each thing that was found, with its item's number in the batch in front; the rows of all
        batches go to :meth:`row_metrics`.
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return metrics from the sums of all batches; one of all metrics has the name of the case's."""

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return metrics from the rows of all batches, in which items are numbered through."""
        raise NotImplementedError(f"{type(self).__name__} collects rows and has no row_metrics()")

    @abstractmethod
    def synthetic_batch(self, size: int) -> InferBatch:
        """Return ``size`` synthetic items with the shapes, types and value ranges of real ones."""

    def calibration_batch(self, size: int) -> InferBatch:
        """Return ``size`` items to calibrate int8, of data that no accuracy is measured on. Raises DataError: none."""
        problem = "the case has no data for the calibration of int8 besides the data of its accuracy"
        raise DataError(f"{problem}: choose another precision, or define calibration_batch in its infer_pytorch.py")

    def export_model(self, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
        """Write ``model`` (in eval mode, fp32, on the CPU) to ``path`` as ONNX, with a dynamic batch."""
        export_onnx(model, example, path, self.input_names, self.output_names)

    def model_forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute one batch in the framework; inputs are on the model's device and in its precision."""
        return as_list(model(*inputs))

    def perturbed(self, batch: InferBatch, generator: Generator) -> tuple[Tensor, ...]:
        """Return the inputs of a batch, slightly changed, so that no answer for them can be known beforehand.

        By default noise of 1 % of their standard deviation is added to floating-point inputs. A case with integer
        inputs only overrides this, for example with :func:`swap_neighbours`.
        """
        return tuple(_with_noise(each, generator) if each.is_floating_point() else each for each in batch.inputs)


def _with_noise(values: Tensor, generator: Generator) -> Tensor:
    """Add evenly distributed integers of 16 bits, scaled: a normal distribution takes ten times as long to draw."""
    seed = int(torch.randint(2**62, (), generator=generator))
    drawn = np.random.Generator(np.random.SFC64(seed)).integers(0, 2**64, -(-values.numel() // 4), np.uint64)
    noise = torch.from_numpy(drawn.view(np.int16)[: values.numel()]).view(values.shape)
    plain = values.float()
    deviation = float((plain - plain.mean()).norm()) / math.sqrt(plain.numel())  # std() takes four times as long
    drawn_deviation = 2**16 / math.sqrt(12)
    return plain.add(noise, alpha=0.01 * deviation / drawn_deviation).to(values.dtype)


def swap_neighbours(tokens: Tensor, movable: Tensor, generator: Generator) -> Tensor:
    """Return tokens of shape (items, length) with two neighbours exchanged in each row where two are ``movable``."""
    pairs = (movable[:, :-1] & movable[:, 1:] & (tokens[:, :-1] != tokens[:, 1:])).float()
    first = (pairs * torch.empty(pairs.shape).uniform_(0.5, 1, generator=generator)).argmax(1, keepdim=True)
    places = torch.cat([first, first + 1], 1)
    swapped = tokens.scatter(1, places, tokens.gather(1, places).flip(1))
    return torch.where(pairs.any(1, keepdim=True), swapped, tokens)


class ClassificationCase(InferCase):
    """Prediction of labels by the largest logit along the last dimension; a label of -100 is not counted."""

    output_names = ("logits",)
    metric: ClassVar[str] = "top1"
    """Name of the share of correct predictions."""

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correct predictions."""
        right = (outputs[0].argmax(-1) == labels).sum()
        return {"right": float(right), "count": float((labels != IGNORED).sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of correct predictions."""
        return {self.metric: sums["right"] / max(1.0, sums["count"])}


class IterativeModel(nn.Module, ABC):
    """A model that makes an answer step by step, such as the tokens of a decoder or the steps of a denoiser.

    Rounding in one step changes all later ones, so the framework, in fp32, checks every step of an engine by itself.
    The model returns what each step computed: floating-point outputs, which are compared by their error, and integers,
    the choices of the steps, by the share that the framework would have chosen too (``IGNORED`` after an answer's end).
    Its forward takes the case's inputs and, optionally, the outputs of an earlier call after them. With those it
    returns its outputs for the same steps, each computed from what the earlier call returned for the steps before it.
    """

    @abstractmethod
    def parts(self) -> Sequence[nn.Module]:
        """Return the modules that steps compute with, each with few shapes, which an engine may compile in place."""
