"""The parts of a training backend that are the same for every framework whose batches and checkpoints are NumPy arrays.

A framework subclasses :class:`ArrayBackend`. It keeps the same state on every rank, so that any rank can save it.
"""

from __future__ import annotations

import math
import platform
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, final

import numpy as np

from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import Event, Started
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import Precision
from accelmark.train.batches import Arrays, SyntheticArrayBatches, naming_bad_samples
from accelmark.train.case import ArrayCase, Batches, case_class
from accelmark.train.loop.backend import RankBackend
from accelmark.train.loop.checkpoint_directory import unreadable
from accelmark.train.loop.checkpoints import (
    ArrayCheckpoints,
    NamedArrays,
    structure_hash,
    update_squares,
    weights_hash,
)
from accelmark.train.loop.contract import Progress, Replay
from accelmark.train.loop.epochs import EpochSize, repeat_steps
from accelmark.train.loop.process import handle_signals_again

OPTIMIZER_CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}
CaseT = TypeVar("CaseT", bound=ArrayCase)


@final
@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """The device of a rank."""

    label: str
    """Its name in messages, for example ``gpu:0``."""
    name: str | None
    """The product's name."""
    index: int | None
    threads: int
    precision: Precision
    """Precision in which matrix products are computed."""


@final
class LaterLosses:
    """Losses stay on the device until a window is read."""

    def keep(self, loss: Any) -> Any:
        """Return the loss."""
        return loss

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Return a function that waits for the losses."""
        return lambda: [float(np.asarray(loss)) for loss in kept]  # float(loss) of JAX takes longer


class ArrayBackend(RankBackend, Generic[CaseT]):
    """One rank's training; see :class:`accelmark.train.loop.contract.Backend`."""

    framework: ClassVar[str]
    """Name of the framework's folder."""
    title: ClassVar[str]
    case_base: ClassVar[type[Any]]
    """The class that cases of the framework derive from."""
    optimizer_classes: ClassVar[Mapping[str, str]] = OPTIMIZER_CLASSES
    """Setting ``optimizer.name`` -> class."""
    memory_advice: ClassVar[str] = "precision bf16"
    checkpoints: ArrayCheckpoints

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        super().__init__(job, train, place, log)
        self._device: OpenedDevice | None = None
        self.steps_done = 0
        self.own_part_unknown: str | None = None
        self.step: Callable[[list[Any]], Any] = self._step

    @abstractmethod
    def open_device(self) -> OpenedDevice:
        """Open this rank's device with threads and precision, and join the ranks."""

    def open_case(self, found: type[CaseT]) -> CaseT:
        """Return the case, an object of the class that its file defines."""
        return found(self.settings, self.job.data_dirs, self.place)

    @abstractmethod
    def build_model(self) -> str:
        """Build the model of ``self.case`` with the same weights on every rank; returns the name of its class."""

    @abstractmethod
    def parameters(self) -> NamedArrays:
        """Return the trainable parameters by name, on every rank."""

    @abstractmethod
    def count_flops(self) -> float | None:
        """Return the FLOPs of a sample by counting; None, after a warning event, where they cannot be counted."""

    @abstractmethod
    def build_training(self) -> None:
        """Build the optimizer, and what else a step needs."""

    @abstractmethod
    def compute_type(self) -> str:
        """Return the type of a matrix product in a step."""

    @abstractmethod
    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the framework's version, and those of libraries that change results."""

    @abstractmethod
    def to_device(self, batch: Arrays) -> Any:
        """Return a batch on the device."""

    @abstractmethod
    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Take one optimizer step over some batches, and return its loss without waiting for the device."""

    @abstractmethod
    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Return the case's sums over a batch of evaluation data, scalars."""

    @abstractmethod
    def state(self) -> NamedArrays:
        """Return all that a step changes, as arrays by name."""

    @abstractmethod
    def set_state(self, arrays: NamedArrays) -> None:
        """Restore what :meth:`state` returned.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another shape.
        """

    @abstractmethod
    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""

    @abstractmethod
    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum of each value over all ranks."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which batches are evaluated."""
        return nullcontext()

    def prepare(self) -> Started:
        """Open the device, join the ranks, and build data, model and optimizer."""
        job, settings, place, log = self.job, self.settings, self.place, self.log
        if job.extern is not None and (job.extern.path / "extern").is_dir():
            raise RequestError(f"{job.extern.path / 'extern'}: the {self.title} backend has no hooks to replace")
        found = case_class(job.case, self.framework, self.case_base)
        device = self._device = self.open_device()
        handle_signals_again()
        if device.precision != settings.precision:
            message = f"{self.title} has no {settings.precision} on {device.label}; computing in {device.precision}"
            log.event(Event.WARNING, {"message": message})
        log.event(Event.LAUNCH_TRAINING, {"hooks": {}})
        case = self.case = self.open_case(found)
        batches = self._batches = self._open_data()
        size = EpochSize.of(settings, batches.num_samples, self.world_size)
        self.samples_per_step, self.steps_per_epoch = size.samples_per_step, size.steps_per_epoch
        self._learning_rate = size.learning_rate(settings, case.peak_learning_rate())
        model_class = self.timed(Event.CONVERT_MODEL, self.build_model)
        initial = self.parameters()
        structure, optimizer = structure_hash(initial), self.optimizer_classes[settings.optimizer.name]
        weights = weights_hash(initial) if place.rank == 0 else None
        self.num_parameters = sum(array.size for array in initial.values())
        del initial
        self.flops_per_sample_formula = case.flops_per_sample()
        if place.rank == 0:
            self.flops_per_sample = self.count_flops()
        self.build_training()
        self.checkpoints = ArrayCheckpoints(job.checkpoint_dir, place, self.exchange_max)
        if not settings.loader.synthetic:
            self.eval_batches = self.timed(Event.INIT_EVALUATION, case.eval_batches)
        version, libraries = self.versions()
        return Started(
            framework=self.framework,
            framework_version=version,
            device_type=job.device_type,
            device_name=device.name,
            device_index=device.index,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=device.threads,
            seed=settings.seed,
            precision=device.precision,
            model_class=model_class,
            num_parameters=self.num_parameters,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            checkpoint_hash=weights,
            optimizer_class=optimizer,
            standard_optimizer_class=optimizer,
            compute_type=self.compute_type(),
            train_samples=batches.num_samples,
            eval_samples=None if self.eval_batches is None else self.eval_batches.num_samples,
            hooks={},
            library_versions={"python": platform.python_version(), **libraries},
            own_part_unknown=self.own_part_unknown,
        )

    def _open_data(self) -> Batches:
        if not self.settings.loader.synthetic:
            return self.case.train_batches()
        batch = self.case.synthetic_batch(self.settings.batch_size)
        return SyntheticArrayBatches(batch, self.settings, self.world_size)

    def _step(self, batches: list[Any]) -> Any:
        loss = self.take_step(batches, self.learning_rate())
        self.steps_done += 1
        return loss

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._learning_rate(self.steps_done)

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each step on the device; the next step's are copied while one is computed."""
        self.phase = f"epoch {epoch}"
        count = self.settings.gradient_accumulation_steps
        batches = naming_bad_samples(self._batches.epoch(epoch, skip_steps * count), self._batches, self.log)
        ahead: list[Any] | None = None
        while len(chosen := list(islice(batches, count))) == count:
            copied = [self.to_device(batch) for batch in chosen]
            if ahead is not None:
                yield ahead
            ahead = copied
        if ahead is not None:
            yield ahead

    def evaluate_on(self, batches: Any) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data."""
        found: dict[str, list[Any]] = {}
        with self.evaluating():
            for batch in islice(batches.epoch(0), self.settings.evaluate.max_batches):
                for name, value in self.eval_sums(batch).items():
                    found.setdefault(name, []).append(value)
        if not found:
            raise DataError("the case's eval_batches yielded nothing; check the evaluation data")
        sums = {name: math.fsum(map(float, values)) for name, values in sorted(found.items())}
        joint = zip(sums, self.mean(list(sums.values())), strict=True)
        return self.case.metrics({name: value * self.world_size for name, value in joint})

    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, and return the progress of training."""
        arrays, progress = self.checkpoints.load(checkpoint)
        try:
            self.set_state(arrays)
        except (KeyError, ValueError) as error:
            raise unreadable(checkpoint, error) from error
        self.steps_done = progress.global_steps
        return progress

    def save(self, progress: Progress) -> str:
        """Write a checkpoint and return its name."""
        return self.checkpoints.save(self.state, progress, lambda: self.mean([0.0]))

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        """Take steps from a checkpoint or the initial weights, and compare the weights with those of ``end``."""
        progress = Progress() if start is None else self.load(start)
        before = self.parameters()
        replay = repeat_steps(self, progress, num_steps)
        if end is not None:
            replayed = self.parameters()
            self.load(end)
            replay.update = update_squares(before, replayed, self.parameters())
        return replay

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None where the framework does not count."""

    def trained(self) -> None:
        """Log nothing: everything is known before."""

    def device_label(self) -> str:
        """Return the name of the device in messages."""
        return self.job.device_type if self._device is None else self._device.label

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""
