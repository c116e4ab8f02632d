"""Windows of optimizer steps, read one window later without waiting for the device, and the totals of one rank."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

from accelmark.spec.backports import zip_strict
from accelmark.spec.job import TrainingWork
from accelmark.spec.log.events import Event, Finished, StepWindow
from accelmark.spec.log.perflog import EventLog
from accelmark.train.loop.contract import Backend, LossReader, Progress, StepClock
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import CpuWait


class GarbagePauses:
    """Python's garbage collections: objects from before training are frozen, so that no collection scans them."""

    def __init__(self) -> None:
        self._began_ns = self._total_ns = 0

    def start(self) -> None:
        """Collect, freeze the remaining objects, and measure the collections from now on."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Unfreeze, and measure no longer."""
        gc.callbacks.remove(self._note)
        gc.unfreeze()

    def collect(self) -> float:
        """Collect young objects between two steps; returns the milliseconds of all collections since the last call."""
        gc.collect(1)
        total_ns, self._total_ns = self._total_ns, 0
        return total_ns / 1e6

    def _note(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_ns = time.monotonic_ns()
        else:
            self._total_ns += time.monotonic_ns() - self._began_ns


SLOW: Final = 1.5
"""A step is slow if it takes more than 1.5 times the median."""


class ClosedWindow(NamedTuple):
    """A closed window; the device may not have computed all of its figures yet."""

    fields: dict[str, Any]
    """Of :class:`StepWindow`, which are known when it closes."""
    marks: list[tuple[Any, Any, Any]]
    data_wait_ns: list[int]
    closed_ns: int
    losses: Callable[[], list[float]]


class Window:
    """Collects the marks, losses and data waits of steps; ``clock`` is None where only windows are timed."""

    def __init__(self, clock: StepClock | None, reader: LossReader) -> None:
        self._clock, self._reader, self._keep = clock, reader, reader.keep
        self._marks: list[tuple[Any, Any, Any]] = []
        self._losses: list[Any] = []
        self._waits: list[int] = []

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, start: Any, own_end: Any, end: Any, data_wait_ns: int, loss: Any) -> Any:
        """Add one step; returns the stored form of its loss (a float where it can be read at once).

        ``own_end`` marks the end of the rank's own part of the step, or lists its exchanges with other ranks.
        """
        loss_handle = self._keep(loss)
        self._marks.append((start, own_end, end))
        self._waits.append(data_wait_ns)
        self._losses.append(loss_handle)
        return loss_handle

    def last_is_nonfinite(self) -> bool:
        """Return whether the last loss is NaN or infinite; only where the reader keeps floats."""
        return not math.isfinite(self._losses[-1])

    def close(self, closed_ns: int, **fields: Any) -> ClosedWindow:
        """Start copying the figures to the host, and begin an empty window; ``fields`` are of :class:`StepWindow`."""
        closed = ClosedWindow(fields, self._marks, self._waits, closed_ns, self._reader.fetch(self._losses))
        self._marks, self._losses, self._waits = [], [], []
        return closed

    def read(self, closed: ClosedWindow, gc_ms: float = 0.0, new_retries: Callable[[], int] = int) -> StepWindow:
        """Return a closed window's figures, waiting for its last step; ``new_retries`` is called where one was slow."""
        losses = closed.losses()
        step_ms: tuple[float, ...] = ()
        own_ms: tuple[float, ...] = ()
        span_ms: float | None = None
        if self._clock is not None:
            elapsed_ms = self._clock.elapsed_ms

            def own(start: Any, own_end: Any, _end: Any, total_ms: float) -> float:
                """Return the milliseconds up to the end of the rank's own part, or without its exchanges."""
                if isinstance(own_end, list):
                    spans = ((elapsed_ms(start, begin), elapsed_ms(start, end)) for begin, end in own_end)
                    return total_ms - covered(spans)
                return elapsed_ms(start, own_end)

            step_ms = tuple(round(elapsed_ms(start, end), 4) for start, _, end in closed.marks)
            if all(own_end is not None for _, own_end, _ in closed.marks):
                own_ms = tuple(round(own(*mark, total), 4) for mark, total in zip_strict(closed.marks, step_ms))
            span_ms = round(elapsed_ms(closed.marks[0][0], closed.marks[-1][2]), 4)
            self._clock.release([mark for marks in closed.marks for mark in _flat(marks)])
        # Without validation: all values are computed here, and a window is read between two steps.
        return StepWindow.model_construct(
            **closed.fields,
            loss=losses[-1],
            losses=tuple(losses),
            step_ms=step_ms,
            data_wait_ms=tuple(round(wait / 1e6, 4) for wait in closed.data_wait_ns),
            own_ms=own_ms,
            span_ms=span_ms,
            gc_ms=round(gc_ms, 4),
            alloc_retries=new_retries() if step_ms and max(step_ms) > SLOW * median(step_ms) else 0,
        )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which may overlap."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _flat(marks: Iterable[Any]) -> Iterator[Any]:
    for mark in marks:
        if isinstance(mark, (list, tuple)):
            yield from _flat(mark)
        elif mark is not None:
            yield mark


@dataclass
class RunTotals:
    """Totals of a rank; all times are readings of ``time.monotonic``."""

    process_start: float
    train_start: float | None = None
    train_end: float | None = None
    evaluation_s: float = 0.0
    compute_ms: float = 0.0
    num_samples_before: int = 0
    """Samples trained by an earlier process that this one resumed."""
    progress: Progress = field(default_factory=Progress)
    final_loss: float | None = None
    last_finite_loss: float | None = None
    last_finite_loss_step: int | None = None
    peak_device_memory_mib: float | None = None
    backend: Backend | None = None
    job: TrainingWork | None = None
    cpu_wait: CpuWait = field(default_factory=CpuWait)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_written: bool = False

    def elapsed_s(self) -> float:
        """Return the raw training time so far."""
        return 0.0 if self.train_start is None else time.monotonic() - self.train_start

    def training_s(self) -> float:
        """Return the training time so far without evaluations."""
        return self.elapsed_s() - self.evaluation_s

    def take(self, window: StepWindow) -> int | None:
        """Add the figures of a window; returns its first step with a non-finite loss, or None."""
        self.compute_ms += sum(window.step_ms)
        self.final_loss = window.loss
        first = window.global_steps - len(window.losses) + 1
        losses = enumerate(window.losses, first)
        bad = next((number for number, loss in losses if loss is None or not math.isfinite(loss)), None)
        good = window.losses if bad is None else window.losses[: bad - first]
        if good:
            self.last_finite_loss = good[-1]
            self.last_finite_loss_step = first + len(good) - 1
        return bad

    def write_finished(self, end: End, log: EventLog) -> None:
        """Write FINISHED exactly once, from whichever thread is first; the other waits until it is written."""
        with self._lock:
            if not self._is_written:
                self._is_written = True
                log.event(Event.FINISHED, self.finished(end))

    def finished(self, end: End) -> Finished:
        """Return the value of FINISHED at this time."""
        now = time.monotonic()
        train_start = self.train_start if self.train_start is not None else now
        train_end = self.train_end if self.train_end is not None else now
        raw_s = train_end - train_start
        training_s = max(0.0, raw_s - self.evaluation_s)
        compute_s = self.compute_ms / 1000
        units_per_sample = 1 if self.job is None else self.job.units_per_sample
        units = (self.progress.num_trained_samples - self.num_samples_before) * units_per_sample
        backend, job = self.backend, self.job
        has_target = job is not None and job.target is not None and not job.settings.loader.synthetic
        return Finished(
            state="completed" if end.completed else "cancelled" if end.reason == "cancelled" else "failed",
            end_reason=end.reason,
            message=end.message,
            converged=self.progress.reached if has_target else None,
            e2e_time=now - self.process_start,
            init_time=train_start - self.process_start,
            raw_train_time=raw_s,
            train_no_eval_time=training_s,
            pure_training_computing_time=compute_s,
            global_steps=self.progress.global_steps,
            num_trained_samples=self.progress.num_trained_samples,
            throughput_raw=_rate(units, raw_s),
            throughput_no_eval=_rate(units, training_s),
            throughput_pure_compute=_rate(units, compute_s),
            final_loss=self.final_loss,
            last_finite_loss_step=self.last_finite_loss_step,
            final_metrics=dict(self.progress.metrics),
            peak_device_memory_mib=self.peak_device_memory_mib,
            num_parameters=backend.num_parameters if backend is not None else 0,
            flops_per_sample=backend.flops_per_sample if backend is not None else None,
            flops_per_sample_formula=backend.flops_per_sample_formula if backend is not None else None,
            core_wait_s=self.cpu_wait.longest_s(),
        )


def _rate(units: int, duration_s: float) -> float | None:
    return units / duration_s if units and duration_s > 0 else None
