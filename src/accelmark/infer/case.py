"""The interface of an inference case in PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol, final

from torch import Tensor, nn

from accelmark.infer.engine import Engine, as_list
from accelmark.infer.onnx_export import export_onnx
from accelmark.spec.inference import InferSettings
from accelmark.spec.settings import Scalar

_IGNORED: Final = -100


@final
@dataclass(frozen=True, slots=True)
class InferBatch:
    """Items of one call: the model's inputs in order, on the CPU, items along the first dimension."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None
    """Labels for the evaluator; None for synthetic data."""

    @property
    def num_items(self) -> int:
        """Items in this batch."""
        return int(self.inputs[0].shape[0])

    def pinned(self) -> InferBatch:
        """Return the batch with inputs in page-locked memory, for asynchronous copies to the device."""
        return InferBatch(tuple(each.pin_memory() for each in self.inputs), self.labels)


class InferBatches(Protocol):
    """The labelled data of a case, in batches of ``settings.batch_size``; the last one may be smaller."""

    @property
    def num_items(self) -> int:
        """Items of one pass."""
        ...

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass over the data, in the same order each time."""
        ...


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
    """Set by ``build_dataloader`` where the data is a subset or a substitute, whose accuracy is only a sanity check."""

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

    @abstractmethod
    def build_dataloader(self) -> InferBatches:
        """Return the labelled data.

        Raises:
            DataError: it is missing, empty, or in the wrong layout.
        """

    @abstractmethod
    def create_model(self) -> nn.Module:
        """Return the model on the CPU in fp32; its forward takes and returns plain tensors."""

    @abstractmethod
    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Return sums over one batch (``correct``, ``count``) that are added over batches; tensors are on the CPU."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return metrics from the sums of all batches; one has the name of the case's metric."""

    @abstractmethod
    def synthetic_batch(self, size: int) -> InferBatch:
        """Return ``size`` synthetic items with the shapes, types and value ranges of real ones."""

    def export_model(self, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
        """Write ``model`` (in eval mode, fp32, on the CPU) to ``path`` as ONNX, with a dynamic batch."""
        export_onnx(model, example, path, self.input_names, self.output_names)

    def model_forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute one batch in the framework; inputs are on the model's device and in its precision."""
        return as_list(model(*inputs))

    def engine_forward(self, engine: Engine, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch of CPU tensors in the engine; return CPU tensors and seconds that are not inference."""
        return engine(inputs)


class Classification(InferCase):
    """Prediction of labels by the largest logit along the last dimension; a label of -100 is not counted."""

    output_names = ("logits",)
    metric: ClassVar[str] = "top1"
    """Name of the share of correct predictions."""

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correct predictions."""
        right = (outputs[0].argmax(-1) == labels).sum()
        return {"right": float(right), "count": float((labels != _IGNORED).sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of correct predictions."""
        return {self.metric: sums["right"] / max(1.0, sums["count"])}
