"""The contract between the training loop and the backend of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

from accelmark.spec.errors import RunError
from accelmark.spec.log.events import EndReason, Started, TracedStep, UpdateSquares


@final
@dataclass
class Progress:
    """Progress of training: everything in a checkpoint except tensors."""

    epoch: int = 0
    step_in_epoch: int = 0
    global_steps: int = 0
    num_trained_samples: int = 0
    """Over all ranks."""
    reached: bool = False
    """Whether an evaluation has reached the target."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    pairs: list[tuple[str | None, str]] = field(default_factory=list)
    """Checkpoints between which steps can be replayed, in order, up to this one; None: the initial weights."""
    target_checkpoint: str | None = None
    """The checkpoint of the first evaluation that reached the target."""


class ForeignStateError(RunError):
    """A checkpoint's optimizer state is that of another implementation, so that no steps can be replayed from it."""


@final
@dataclass
class Replay:
    """Optimizer steps that were repeated from a checkpoint or from the initial weights."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    update: UpdateSquares | None = None
    """None without a checkpoint to compare with."""
    state: dict[str, UpdateSquares] = field(default_factory=dict)
    """Of the other values at the end: ``buffers``, and each kind of the optimizer's state by its name."""


class StepClock(Protocol):
    """Marks points in the device's time, which are read later."""

    def mark(self) -> Any:
        """Mark the current end of the device's work queue, without waiting."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the time between two marks, waiting for the second where the device has not reached it."""
        ...

    def release(self, marks: list[Any]) -> None:
        """Reuse marks that are not read again."""
        ...


class LossReader(Protocol):
    """Copies the losses of a window to the host."""

    def keep(self, loss: Any) -> Any:
        """Return the stored form of a step's loss, without waiting for the device."""
        ...

    def fetch(self, losses: list[Any]) -> Callable[[], list[float]]:
        """Start copying kept losses; the returned function waits for them."""
        ...


class StepTracer(Protocol):
    """Times single steps with their collectives, at a cost."""

    cost_s: float
    """The largest cost of a trace on this rank so far, without the step."""

    def take(self, batches: list[Any]) -> tuple[Any, TracedStep | None]:
        """Take an optimizer step as ``Backend.step`` does, wait for it, and return its loss and its times."""
        ...


class Backend(Protocol):
    """One rank's training in a framework. The driver treats batches, losses and marks as opaque.

    ``backend.py`` of a framework's folder defines
    ``open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend``.
    """

    world_size: int
    steps_per_epoch: int
    samples_per_step: int
    """Samples of an optimizer step over all ranks."""
    immediate: bool
    """Whether the work of a step is done when ``step`` returns, so that its loss and time can be read at once."""
    clock: StepClock | None
    """None where only windows of steps are timed; then the driver calls ``synchronize`` before it closes a window."""
    own_end: Callable[[], Any] | None
    """Returns the mark at which this rank's own part of the last step ended, before it waited for other ranks, or the
    list of (begin, end) of its exchanges with them, or None if the step has neither; None where no step has."""
    tracer: StepTracer | None
    """Times some steps where ``own_end`` is None; all ranks have one, or none."""
    losses: LossReader
    num_parameters: int
    flops_per_sample: float | None
    flops_per_sample_formula: float | None
    step: Callable[[list[Any]], Any]
    """Take one optimizer step over some batches and return its loss, without waiting for the device."""

    def prepare(self) -> Started:
        """Build everything up to the first step, and log an event for each part."""
        ...

    def restore(self) -> Progress | None:
        """Load the newest checkpoint if the job resumes and there is one."""
        ...

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step of an epoch, on the device, from step ``skip_steps`` on."""
        ...

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        ...

    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over its evaluation data, the same on every rank.

        ``weights`` is a checkpoint whose weights are loaded first; None evaluates the current ones.
        """
        ...

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        """Restore the checkpoint ``start``, and take ``num_steps`` optimizer steps from it.

        Args:
            start: None for the state that :meth:`prepare` left, on which no step was taken yet.
            end: the checkpoint that training wrote after them, whose weights are compared with the replayed weights.

        Raises ForeignStateError: the checkpoint has the optimizer state of another implementation.
        """
        ...

    def save(self, progress: Progress) -> str:
        """Write a checkpoint into the job's ``checkpoint_dir`` and return its name; remove none.

        Names sort by optimizer steps; the loop removes the directories that are no longer needed. With
        ``checkpoint.asynchronous``, a thread may still write the files afterwards.
        """
        ...

    def finish_save(self) -> float:
        """Wait until the checkpoint that ``save`` began is complete; called with ``checkpoint.asynchronous`` only.

        Returns the seconds that a thread took to write it.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        ...

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum of each value over all ranks; the returned function waits for the result."""
        ...

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        ...

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device so far; None where the framework does not count."""
        ...

    def num_alloc_retries(self) -> int:
        """Return how often the device's allocator has freed its cache to find memory, 0 where it does not count."""
        ...

    def trained(self) -> None:
        """Log facts known only at the end of training, for example the number of compiled graphs."""
        ...

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Return the end reason of an error, and a message with advice."""
        ...

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""
        ...
