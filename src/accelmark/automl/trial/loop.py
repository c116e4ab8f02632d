"""Train one network on one device or on several in step: the loop that the score's images are counted in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from accelmark.automl.data import Dataset, Pictures
from accelmark.automl.graph.module import Array, GraphModule, load_weights, to_weights
from accelmark.automl.schedule import EarlyStop
from accelmark.automl.trial.order import EpochReport, Listener, TrialOrder

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_EVALUATION_BATCH: Final = 512


class DivergedError(RuntimeError):
    """The training loss is no finite number any more."""


@dataclass(frozen=True, slots=True)
class Replica:
    """This process's part in a trial: one of ``world`` devices in step."""

    device: torch.device
    rank: int = 0
    world: int = 1

    def total(self, values: list[float]) -> list[float]:
        """Return the sums of ``values`` over all replicas."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]


@dataclass
class _Tally:
    images: int = 0
    steps: int = 0
    loss: list[Tensor] = field(default_factory=list)


class TrialLoop:
    """Trains a module epoch by epoch and keeps the weights of its best epoch.

    ``began`` is the monotonic time at which the trial began, building included; reports count from it.
    """

    def __init__(
        self,
        order: TrialOrder,
        module: GraphModule,
        dataset: Dataset,
        replica: Replica,
        listener: Listener,
        *,
        began: float,
    ) -> None:
        self.order: Final = order
        self.module: Final = module
        self.data: Final = dataset
        self.replica: Final = replica
        self.listener: Final = listener
        self.precision: str | None = None
        self.best_weights: dict[str, Array] | None = None
        self._began: Final = began
        self._best_accuracy = -1.0
        self._model: nn.Module = module
        if replica.world > 1:
            self._model = DistributedDataParallel(module)
        training, hyper = order.training, order.hyperparameters
        self._batch: Final = min(hyper.batch_size, len(dataset.training))
        self._total_steps: Final = order.epochs * max(1, len(dataset.training) // self._batch)
        self._optimizer = torch.optim.SGD(
            module.parameters(),
            lr=hyper.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        self._scaler = torch.amp.GradScaler(replica.device.type, enabled=training.precision == "fp16")
        self._steps = 0
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(dataset.mean, device=replica.device).view(shape)
        self._deviation = torch.tensor(dataset.deviation, device=replica.device).view(shape)

    def run(self) -> bool:
        """Train to the last epoch or the early stop; return False when the listener ended it before."""
        stop = EarlyStop.for_round(self.order.round)
        for epoch in range(1, self.order.epochs + 1):
            report = self._epoch(epoch)
            self.listener.epoch(report)
            if not report.complete:
                return False
            loss = report.validation_loss
            if self.order.early_stop and loss is not None and stop.should_stop(loss):
                break
        return True

    def evaluate(self, pictures: Pictures) -> tuple[float, float, int]:
        """Return loss, accuracy and the number of images, of this module over ``pictures``."""
        self.module.eval()
        loss = torch.zeros((), device=self.replica.device)
        right = torch.zeros((), device=self.replica.device)
        mine = np.arange(self.replica.rank, len(pictures), self.replica.world)
        with torch.inference_mode():
            for start in range(0, len(mine), _EVALUATION_BATCH):
                indices = mine[start : start + _EVALUATION_BATCH]
                images, labels = self._tensors(pictures, indices, None)
                with self._autocast():
                    scores = self.module(images)
                loss += cross_entropy(scores.float(), labels, reduction="sum")
                right += (scores.argmax(dim=1) == labels).sum()
                self.listener.progress(len(indices))
        total_loss, total_right, seen = self.replica.total([float(loss), float(right), float(len(mine))])
        return total_loss / seen, total_right / seen, round(seen)

    def _epoch(self, epoch: int) -> EpochReport:
        begun = time.monotonic()
        tally, whole = self._train(epoch)
        trained = time.monotonic()
        images, loss_sum, batches = self.replica.total(
            [float(tally.images), float(sum(float(part) for part in tally.loss)), float(len(tally.loss))]
        )
        train_loss = loss_sum / batches if batches else None
        if train_loss is not None and not np.isfinite(train_loss):
            raise DivergedError(f"the training loss of epoch {epoch} is {train_loss}")
        validation: tuple[float | None, float | None, int] = (None, None, 0)
        if whole:
            validation = self.evaluate(self.data.validation)
            if validation[1] is not None and validation[1] > self._best_accuracy:
                self._best_accuracy = validation[1]
                self.best_weights = to_weights(self.module)
        ended = time.monotonic()
        return EpochReport(
            epoch=epoch,
            begun_s=begun - self._began,
            ended_s=ended - self._began,
            trained_images=round(images),
            evaluated_images=validation[2],
            steps=tally.steps,
            training_s=trained - begun,
            evaluating_s=ended - trained if whole else 0.0,
            train_loss=train_loss,
            validation_loss=validation[0] if validation[0] is None or np.isfinite(validation[0]) else None,
            validation_accuracy=validation[1],
            complete=whole,
        )

    def _train(self, epoch: int) -> tuple[_Tally, bool]:
        self.module.train()
        tally = _Tally()
        generator = np.random.default_rng([self.order.seed, epoch, self.replica.rank])
        for indices in self._batches(epoch):
            if self._must_stop():
                return tally, False
            images, labels = self._tensors(self.data.training, indices, generator)
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate()
            self._optimizer.zero_grad(set_to_none=True)
            with self._autocast():
                scores = self._model(images)
            loss = cross_entropy(scores.float(), labels, label_smoothing=self.order.training.label_smoothing)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self._optimizer)
            self._scaler.update()
            tally.loss.append(loss.detach())
            tally.images += len(indices)
            tally.steps += 1
            self._steps += 1
            self.listener.progress(len(indices))
            if self.precision is None:
                self.precision = self._used_precision(scores.dtype)
        if self.replica.device.type != "cpu":
            torch.accelerator.synchronize()
        return tally, True

    def _batches(self, epoch: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Yield this replica's part of every global batch; the last, incomplete batch is left out."""
        order = np.random.default_rng([self.order.seed, epoch]).permutation(len(self.data.training))
        for start in range(0, len(order) - self._batch + 1, self._batch):
            yield order[start : start + self._batch][self.replica.rank :: self.replica.world]

    def _tensors(
        self,
        pictures: Pictures,
        indices: np.ndarray[tuple[int], np.dtype[np.int64]],
        generator: np.random.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        device = self.replica.device
        images = torch.from_numpy(np.ascontiguousarray(pictures.batch(indices, generator))).to(device)
        scaled = (images.float() / 255 - self._mean) / self._deviation
        return scaled, torch.from_numpy(pictures.labels[indices]).to(device)

    def _learning_rate(self) -> float:
        done = min(1.0, self._steps / self._total_steps)
        first, last = self.order.hyperparameters.learning_rate, self.order.training.final_learning_rate
        return first + (last - first) * done

    def _autocast(self) -> torch.autocast:
        name = self.order.training.precision
        return torch.autocast(
            self.replica.device.type, dtype=_DTYPES.get(name, torch.bfloat16), enabled=name in _DTYPES
        )

    def _used_precision(self, computed: torch.dtype) -> str:
        """Name the precision that the matrix work really ran in, by what the dense layer put out."""
        name = _NAMES.get(computed, str(computed))
        if name == "fp32" and self.replica.device.type == "cuda" and torch.backends.cudnn.allow_tf32:
            return "tf32"
        return name

    def _must_stop(self) -> bool:
        limit = self.order.limit_s
        wanted = self.listener.should_stop() or (limit is not None and time.monotonic() - self._began >= limit)
        if self.replica.world == 1:
            return wanted
        return self.replica.total([float(wanted)])[0] > 0


def load_best(loop: TrialLoop) -> None:
    """Put the best epoch's weights back into the loop's module."""
    if loop.best_weights is not None:
        load_weights(loop.module, loop.best_weights)
