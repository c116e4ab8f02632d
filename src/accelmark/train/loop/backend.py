"""The common base of the training backends of all frameworks, and clocks and readers of losses without one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, final

from accelmark.spec.errors import AccelmarkError, RequestError, first_line
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import EndReason, Event
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import LossReader, Progress, StepClock, StepTracer

Mark = Any
"""A point in the device's time: an event, or nanoseconds."""


@final
class HostClock:
    """The monotonic clock, for devices whose work is done when a call returns (the CPU)."""

    mark: Final[Callable[[], int]] = staticmethod(time.monotonic_ns)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        return float(end - start) / 1e6

    def release(self, marks: list[Mark]) -> None:
        """Do nothing: marks are numbers."""


@final
class DeviceClock:
    """Device events, recorded in the current stream and reused after they are read.

    ``new_event`` returns an event with ``record()``, ``synchronize()`` and ``elapsed_time(end)`` in milliseconds.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []

    def mark(self) -> Mark:
        """Record an event in the current stream."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds that the device took between two events."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def release(self, marks: list[Mark]) -> None:
        """Reuse events."""
        self._free.extend(marks)


@final
class HostLosses:
    """Losses on the CPU: read at once, so that NaN is detected in its step."""

    def keep(self, loss: Any) -> float:
        """Return the value of a loss tensor with a single element."""
        value: float = loss.item()
        return value

    def fetch(self, losses: list[Any]) -> Callable[[], list[float]]:
        """Return the values as they are."""
        return lambda: losses


class _Hook(Protocol):
    def remove(self) -> object: ...


Watch = Callable[[Callable[[Any], None]], _Hook]
"""Has a function called with the gradient of one parameter in every backward pass, before it is exchanged."""


@final
class OwnPart:
    """Marks the last gradient of each backward pass, before its exchange: where ranks exchange gradients only.

    The first pass shows whose gradient is the last; from then on only that one is watched.
    """

    def __init__(self, watches: Sequence[Watch], clock: StepClock) -> None:
        self._watches = watches
        self._clock = clock
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


class SavedProgress(Protocol):
    """The checkpoints of a job."""

    def newest(self) -> Path | None:
        """Return the newest checkpoint that all hosts have, or None."""
        ...


class RankBackend(ABC):
    """A base of backends; see :class:`accelmark.train.loop.contract.Backend`.

    A subclass sets ``checkpoints`` and, unless data is synthetic, ``eval_batches`` in ``prepare``.
    """

    memory_advice: ClassVar[str]
    """Advice if memory is exhausted, besides a smaller batch."""
    checkpoints: SavedProgress

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        self.job, self.settings, self.place, self.log = job, train.settings, place, log
        self.phase = "initialisation"
        """The rank's current activity, for messages."""
        self.eval_batches: Any = None
        self.world_size = place.world_size
        self.immediate = False
        self.clock: StepClock | None = None
        self.own_end: Callable[[], Any] | None = None
        self.tracer: StepTracer | None = None
        self.losses: LossReader = HostLosses()
        self.num_parameters = 0
        self.flops_per_sample: float | None = None
        self.flops_per_sample_formula: float | None = None

    @abstractmethod
    def device_label(self) -> str:
        """Return the name of the device in messages."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that memory of the device or of the host is exhausted."""

    @abstractmethod
    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, and return the progress of training."""

    @abstractmethod
    def evaluate_on(self, batches: Any) -> dict[str, float]:
        """Return the case's metrics over given data; all ranks take part."""

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
        """Return 0: the framework does not count them."""
        return 0

    def finish_save(self) -> float:
        """Return 0: training waits for all of a checkpoint."""
        return 0.0

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Distinguish out-of-memory from other errors, with advice."""
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
