"""A case small enough for a test: a few linear layers that learn to tell which corner a point is from."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import Batch, Batches, Place, TrainCase
from accelmark.spec.settings.training import TrainSettings

CLASSES = 4


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.activation(self.linear(self.norm(x))))
        return x + y


class Model(nn.Module):
    def __init__(self, features: int, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Points(Batches):
    def __init__(self, x: Tensor, y: Tensor, place: Place, batch_size: int, *, training: bool, seed: int) -> None:
        self.x, self.y, self.place, self.batch_size, self.training = x, y, place, batch_size, training
        self.seed = seed

    @property
    def num_samples(self) -> int:
        whole = self.batch_size * self.place.world_size
        return len(self.x) // whole * whole if self.training else len(self.x)

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        order = torch.arange(len(self.x))
        if self.training:
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.seed + number))
            order = order[: self.num_samples]
        mine = order[self.place.rank :: self.place.world_size]
        for part in torch.split(mine, self.batch_size)[skip:]:
            yield {"x": self.x[part], "y": self.y[part]}


class Case(TrainCase):
    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: Place) -> None:
        super().__init__(settings, data_dirs, place)
        self.features = self.number("features")
        self.calls = 0

    def _points(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        corners = torch.randn(CLASSES, self.features, generator=torch.Generator().manual_seed(7)) * 2
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        return corners[y] + torch.randn(count, self.features, generator=generator), y

    def build_model(self) -> nn.Module:
        model = Model(self.features, self.number("width"), float(self.settings.model["dropout"] or 0))
        model.stem.requires_grad_(not self.settings.model.get("frozen"))
        return model

    def train_batches(self) -> Batches:
        x, y = self._points(self.number("samples"), 1)
        seed = self.place.shared_seed * 1000
        return Points(x, y, self.place, self.settings.batch_size, training=True, seed=seed)

    def eval_batches(self) -> Batches:
        x, y = self._points(self.number("eval_samples"), 2)
        return Points(x, y, self.place, self.settings.eval_batch_size, training=False, seed=0)

    def synthetic_batch(self, size: int) -> Batch:
        return {"x": torch.randn(size, self.features), "y": torch.randint(0, CLASSES, (size,))}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])
        if batch["x"].device.type == "meta":
            return loss
        self.calls += 1
        return self._trouble(loss)

    def _trouble(self, loss: Tensor) -> Tensor:
        """What can go wrong, where a test asks for it (``model.fault`` at call ``model.fault_at`` of one rank)."""
        if self.settings.model["sleep_ms"]:
            time.sleep(self.number("sleep_ms") / 1000)
        if self.calls != self.settings.model["fault_at"] or self.place.rank != self.settings.model["fault_rank"]:
            return loss
        fault = self.settings.model["fault"]
        if fault == "nan":
            return loss * float("nan")
        if fault == "memory":
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB (made up by a test)")
        if fault == "error":
            raise ValueError("made up by a test")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        logits = model(batch["x"])
        correct = (logits.argmax(-1) == batch["y"]).sum()
        return {"correct": correct, "count": torch.tensor(len(batch["y"]))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["count"], "count": sums["count"]}

    def flops_per_sample(self) -> float | None:
        """3 x 2 x the weights of all linear layers, less the gradient by the input, which the first does not need."""
        width = self.number("width")
        return 6.0 * (self.features * width + 2 * width * width + width * CLASSES) - 2.0 * self.features * width

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Model)
        return list(model.blocks)
