"""What the driver needs of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from accelmark.spec.events import EndReason, Inspected, Started


@final
@dataclass(slots=True)
class Progress:
    """How far training has come: all of it that a checkpoint holds besides tensors."""

    epoch: int = 0
    step_in_epoch: int = 0
    global_steps: int = 0
    num_trained_samples: int = 0
    """Over all ranks."""
    reached: bool = False
    """Whether an evaluation has met the target."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    reference_losses: dict[int, float] = field(default_factory=dict)
    """Losses at the steps of the case's reference curve."""


class Backend(Protocol):
    """One rank's training in a framework. The driver never looks inside batches, losses or marks."""

    world_size: int
    steps_per_epoch: int
    samples_per_step: int
    """Samples of an optimizer step over all ranks."""
    immediate: bool
    """Whether a step is done when ``step`` returns, so that its loss and time can be read at once."""
    clock: Any
    """:class:`accelmark.frameworks.pytorch.clock.Clock`."""
    losses: Any
    """:class:`accelmark.frameworks.pytorch.clock.LossReader`."""
    num_parameters: int
    flops_per_sample: float | None
    flops_per_sample_formula: float | None
    step: Callable[[list[Any]], Any]
    """Take one optimizer step over some batches and return its loss, without waiting for the device."""

    def prepare(self) -> Started:
        """Build everything up to the first step, telling the log what is done."""
        ...

    def restore(self) -> Progress | None:
        """Load the newest checkpoint where the job resumes and there is one."""
        ...

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step of an epoch, on the device, from step ``skip_steps`` on."""
        ...

    def learning_rate(self) -> float:
        """Return the learning rate that the next step uses."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the case's metrics over its evaluation data, the same on every rank."""
        ...

    def save(self, progress: Progress) -> str:
        """Write a checkpoint and return its name."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        ...

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin to take the largest of each value over all ranks; the result waits for them."""
        ...

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        ...

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device so far; None where the framework does not know."""
        ...

    def inspected(self) -> Inspected | None:
        """Return what was seen of a vendor's code up to the end of training; None where there was none."""
        ...

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Return why an error ended the run, in words that tell what to do."""
        ...

    def close(self, *, together: bool) -> None:
        """Leave the process group, ``together`` with the other ranks unless they may be gone."""
        ...
