"""The contract between the training loop and the backend of a framework, with what all backends have in common."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Union

from accelmark.spec.errors import AccelmarkError, RequestError, RunError, first_line
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import EndReason, Event, Started, UpdateSquares
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace

Mark = Any
"""A point in the device's time: an event, or nanoseconds."""


@dataclass
class Progress:
    """Progress of training: everything in a checkpoint except tensors."""

    epoch: int = 0
    step_in_epoch: int = 0
    global_steps: int = 0
    num_trained_samples: int = 0
    """Over all ranks."""
    reached: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str | None, str]] = field(default_factory=list)
    """Checkpoints between which steps can be replayed, in order, up to this one; None: the initial weights."""
    target_checkpoint: str | None = None
    """The checkpoint of the first evaluation that reached the target."""

    def counts(self) -> dict[str, Any]:
        """Return the steps, epoch and samples so far, by the names that they have in events."""
        return {"global_steps": self.global_steps, "epoch": self.epoch, "num_trained_samples": self.num_trained_samples}


class ForeignStateError(RunError):
    """A checkpoint's optimizer state is that of another implementation, so that no steps can be replayed from it."""


@dataclass
class Replay:
    """Optimizer steps that were repeated from a checkpoint or from the initial weights."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    update: UpdateSquares | None = None
    """None without a checkpoint to compare with."""
    state: dict[str, UpdateSquares] = field(default_factory=dict)
    """Of the other values at the end: ``buffers``, and each kind of the optimizer's state by its name."""


class HostClock:
    """The monotonic clock, for devices whose work is done when a call returns (the CPU)."""

    mark: Final[Callable[[], int]] = staticmethod(time.monotonic_ns)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        return float(end - start) / 1e6

    def release(self, marks: list[Mark]) -> None:
        """Do nothing: marks are numbers."""


class DeviceClock:
    """Device events, recorded in the current stream and reused after they are read.

    ``new_event`` returns an event with ``record()``, ``synchronize()`` and ``elapsed_time(end)`` in milliseconds.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []

    def mark(self) -> Mark:
        """Record an event in the current stream, without waiting."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds that the device took between two events; waits for the second."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def release(self, marks: list[Mark]) -> None:
        """Reuse events that are not read again."""
        self._free.extend(marks)


StepClock = Union[HostClock, DeviceClock]


class LossReader(NamedTuple):
    """Copies the losses of a window to the host."""

    fetch: Callable[[list[Any]], Callable[[], list[float]]]
    """Starts copying kept losses; the returned function waits for them."""
    keep: Callable[[Any], Any] = lambda loss: loss
    """Returns the stored form of a step's loss, without waiting for the device."""


HOST_LOSSES: Final = LossReader(lambda losses: lambda: losses, lambda loss: loss.item())
"""Losses on the CPU, tensors with a single element: read at once, so that NaN is detected in its step."""


Watch = Callable[[Callable[[Any], None]], Any]
"""Has a function called with each gradient of a parameter before its exchange; ``remove()`` of the result ends that."""


class OwnPart:
    """Marks the last gradient of each backward pass, before its exchange: the first pass shows whose is the last."""

    def __init__(self, watches: Sequence[Watch], clock: StepClock) -> None:
        self._watches, self._clock = watches, clock
        self._mark: Any = None
        self._last = 0
        self._hooks = [watch(partial(self._arrived, index)) for index, watch in enumerate(watches)]

    def _arrived(self, index: int, _gradient: Any) -> None:
        if self._mark is not None:
            self._clock.release([self._mark])
        self._mark, self._last = self._clock.mark(), index

    def take(self) -> Any:
        """Return the mark of the last backward pass since the last call; None where there was none."""
        if len(self._hooks) > 1 and self._mark is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = [self._watches[self._last](partial(self._arrived, self._last))]
        mark, self._mark = self._mark, None
        return mark


class Backend(ABC):
    """One rank's training in a framework. The driver treats batches, losses and marks as opaque.

    ``backend.py`` of a framework's folder defines
    ``open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend``.
    """

    memory_advice: ClassVar[str] = "precision bf16"
    """Advice if memory is exhausted, besides a smaller batch."""
    steps_per_epoch: int
    samples_per_step: int
    """Samples of an optimizer step over all ranks."""
    step: Callable[[list[Any]], Any]
    """Take one optimizer step over some batches and return its loss, without waiting for the device."""
    checkpoints: Any
    """Its ``newest()`` returns the newest checkpoint that all hosts have, or None."""

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        self.job, self.settings, self.place, self.log = job, train.settings, place, log
        self.phase = "initialisation"
        """The rank's current activity, for messages."""
        self.eval_batches: Any = None
        """Set by ``prepare`` unless data is synthetic."""
        self.world_size = place.world_size
        self.threads = self.settings.threads or max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
        """This rank's share of the host's cores, or the setting."""
        self.immediate = False
        """Whether the work of a step is done when ``step`` returns, so that its loss and time can be read at once."""
        self.clock: StepClock | None = None
        """None where only windows of steps are timed; then the driver calls ``synchronize`` before it closes one."""
        self.own_end: Callable[[], Any] | None = None
        """Returns the mark at which this rank's own part of the last step ended, before it waited for other ranks, or
        the list of (begin, end) of its exchanges with them, or None if the step has neither; None where no step has."""
        self.tracer: Any = None
        """Times some steps where ``own_end`` is None; all ranks have one, or none.

        ``take(batches)`` takes a step as ``step`` does, waits for it, and returns its loss and ``TracedStep | None``.
        ``cost_s`` is the largest cost of a trace on this rank so far, without the step.
        """
        self.losses = HOST_LOSSES
        self.num_parameters = 0
        self.flops_per_sample: float | None = None
        self.flops_per_sample_formula: float | None = None

    @abstractmethod
    def prepare(self) -> Started:
        """Build everything up to the first step, and log an event for each part."""

    @abstractmethod
    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step of an epoch, on the device, from step ``skip_steps`` on."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""

    @abstractmethod
    def evaluate_on(self, batches: Any) -> dict[str, float]:
        """Return the case's metrics over given data; all ranks take part."""

    @abstractmethod
    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, and return the progress of training."""

    @abstractmethod
    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        """Take ``num_steps`` optimizer steps from the checkpoint ``start``, or (None) the state that ``prepare`` left.

        The weights are compared with those of ``end``, the checkpoint that training wrote after them. Raises
        ForeignStateError: the checkpoint has the optimizer state of another implementation.
        """

    @abstractmethod
    def save(self, progress: Progress) -> str:
        """Write a checkpoint into the job's ``checkpoint_dir`` and return its name; remove none.

        Names sort by optimizer steps; the loop removes the directories that are no longer needed. With
        ``checkpoint.asynchronous``, a thread may still write the files afterwards.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    @abstractmethod
    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum of each value over all ranks; the returned function waits for the result."""

    @abstractmethod
    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""

    @abstractmethod
    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device so far; None where the framework does not count."""

    @abstractmethod
    def device_label(self) -> str:
        """Return the name of the device in messages."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that memory of the device or of the host is exhausted."""

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""

    def summary(self, error: BaseException) -> str:
        """Return the line of an error with its cause."""
        return first_line(error)

    def timed(self, event: Event, build: Callable[[], Any]) -> Any:
        """Call ``build``, and log how long it took."""
        start = time.monotonic()
        built = build()
        self.log.event(event, {"duration_s": round(time.monotonic() - start, 6)})
        return built

    def restore(self) -> Progress | None:
        """Load the newest checkpoint where the job resumes and there is one."""
        newest = self.checkpoints.newest() if self.job.resume else None
        return None if newest is None else self.load(newest)

    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data, with a checkpoint's weights if one is given."""
        if self.eval_batches is None:
            raise RequestError("there is no evaluation on synthetic data")
        if weights is not None:
            self.load(weights)
        return self.evaluate_on(self.eval_batches)

    def num_alloc_retries(self) -> int:
        """Return how often the device's allocator has freed its cache to find memory; 0 where it does not count."""
        return 0

    def finish_save(self) -> float:
        """Wait until the checkpoint that ``save`` began is complete; returns the seconds that a thread took for it."""
        return 0.0

    def trained(self) -> None:  # noqa: B027 - most frameworks have nothing to log
        """Log facts known only at the end of training, for example the number of compiled graphs."""

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Return the end reason of an error, and a message with advice."""
        summary = self.summary(error)
        if isinstance(error, MemoryError) or self.is_out_of_memory(error):
            settings = self.settings
            return "out_of_memory", (
                f"out of memory on {self.device_label()} in {self.phase}, with batch_size {settings.batch_size}, "
                f"precision {settings.precision} and parallelism {settings.parallelism}; try a smaller batch_size with "
                f"more gradient_accumulation_steps, or {self.memory_advice} ({summary})"
            )
        if isinstance(error, AccelmarkError):
            return "error", str(error)
        return "error", f"{type(error).__name__}: {summary}"
