"""The interface of a training case in PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.spec.parallelism import ONE_RANK, Mesh
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.batches import ArrayPlace, BatchSource
from accelmark.train.case import ModelSettings
from accelmark.train.loop.ends import learning_rate_factor

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart

Batch = Mapping[str, Tensor]
"""Named tensors with the samples along the first dimension."""
Split = Literal["columns", "rows"]
"""How tensor parallelism splits a linear layer: a rank has some of its outputs, or some of its inputs, where the
outputs of all ranks are added up."""


@dataclass(frozen=True)
class PipelineParts:
    """Modules of a model that the stages of a pipeline divide, by name; all others are in every stage."""

    first: str
    """The embedding, in the first stage; in other stages, the received states take its place."""
    blocks: str
    last: tuple[str, ...]


Batches = BatchSource[Batch]
"""A rank's share of a data set, in batches on the CPU (or already on the device, for small sets)."""


@dataclass(frozen=True)
class Place(ArrayPlace):
    """The position of this process among those with samples of their own; ranks that share samples are one."""

    device: torch.device
    seed: int
    """This rank's own seed; ``shared_seed`` is the same on every rank."""
    mesh: Mesh = ONE_RANK
    """All ranks of the job, with the number of replicas."""


class TrainCase(ModelSettings, ABC):
    """A standard workload in PyTorch: subclass it as ``Case`` in ``cases/<model>/pytorch.py``.

    The driver owns the loop, precision, parallelism, logging, timing, checkpoints and the end of training; a case
    does not read the environment, move a model or measure time.
    """

    block_class: ClassVar[str | None] = None
    """Name of the class of the model's repeated blocks, or of a base class; None: it has no such blocks."""
    sequence: SequencePart | None = None
    """This rank's part of each sequence, once the model is spread with cp; None: every rank has whole sequences."""

    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: Place) -> None:
        self.settings = settings
        self.data_dirs = data_dirs
        self.place = place

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model with its initial or packaged weights, in fp32 on the CPU.

        It is called under ``place.shared_seed``; with FSDP2 on ranks other than 0 it may be under the meta device.
        """

    @abstractmethod
    def train_batches(self) -> Batches:
        """Return this rank's share of the training data, ``settings.batch_size`` samples a batch."""

    @abstractmethod
    def eval_batches(self) -> Batches:
        """Return this rank's share of the evaluation data: every sample exactly once over all ranks."""

    @abstractmethod
    def synthetic_batch(self, size: int) -> Batch:
        """Return a synthetic batch of ``size`` samples with the shapes, types and value ranges of real data."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch, a scalar; runs under the driver's autocast."""

    @abstractmethod
    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``).

        A matrix has a row for each result (a detected box) instead; its rows are collected for ``row_metrics``.
        """

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Turn the rows of all batches and ranks into further metrics; ``eval_sums`` returned them as matrices."""
        return {}

    def flops_per_sample(self) -> float | None:
        """Return forward and backward FLOPs of one sample by formula, to check the counted ones; or None."""
        return None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that ``settings.optimizer`` describes."""
        return build_optimizer(model, self.settings.optimizer, self.place.device)

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int, steps_per_epoch: int) -> Any:
        """Return the learning-rate schedule that ``settings.schedule`` describes, stepped once an optimizer step."""
        return LambdaLR(optimizer, learning_rate_factor(self.settings.schedule, total_steps, steps_per_epoch))

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of ``model``: units of activation checkpointing and of FSDP2's sharding."""
        return [
            module
            for module in model.modules()
            if any(each.__name__ == self.block_class for each in type(module).__mro__)
        ]

    def split_layers(self) -> Mapping[str, Split]:
        """Return the linear layers that tensor parallelism splits, by their names in a block; empty: it cannot."""
        return {}

    def expert_layers(self, model: nn.Module) -> list[str]:
        """Return the names of the layers that hold all experts of a block, which expert parallelism spreads."""
        return []

    def splits_sequences(self) -> bool:
        """Return whether model, losses and evaluation use ``sequence``, as context parallelism needs."""
        return False

    def pipeline_parts(self) -> PipelineParts | None:
        """Return the parts of the model in the stages of a pipeline; None: the model cannot be divided into stages."""
        return None

    def model_input(self, batch: Batch) -> Tensor:
        """Return the model's first input in ``loss``, of shape (samples, length); a pipeline needs it."""
        raise NotImplementedError(f"{type(self).__name__} has no model_input()")
