"""Times and counts of one rank, from which FINISHED can be written at any time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import final

from accelmark.spec.job import TrainingWork
from accelmark.spec.log.events import Event, Finished, StepWindow
from accelmark.spec.log.perflog import EventLog
from accelmark.train.cpu_wait import CpuWait
from accelmark.train.loop.contract import Backend, Progress
from accelmark.train.loop.ends import End
from accelmark.train.loop.window import first_nonfinite


@final
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

    def elapsed_s(self) -> float:
        """Return the raw training time so far."""
        return 0.0 if self.train_start is None else time.monotonic() - self.train_start

    def take(self, window: StepWindow) -> int | None:
        """Add the figures of a window; returns its first step with a non-finite loss, or None."""
        self.compute_ms += sum(window.step_ms)
        self.final_loss = window.loss
        first = window.global_steps - len(window.losses) + 1
        bad = first_nonfinite(window)
        good = window.losses if bad is None else window.losses[: bad - first]
        if good:
            self.last_finite_loss = good[-1]
            self.last_finite_loss_step = first + len(good) - 1
        return bad

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


@final
class FinishedEvent:
    """Writes FINISHED exactly once, from whichever thread is first."""

    def __init__(self, log: EventLog, totals: RunTotals) -> None:
        self._log = log
        self._totals = totals
        self._lock = threading.Lock()
        self._is_written = False

    def write(self, end: End) -> None:
        """Write FINISHED unless it is written already."""
        with self._lock:
            if self._is_written:
                return
            self._is_written = True
            self._log.event(Event.FINISHED, self._totals.finished(end))


def _rate(units: int, duration_s: float) -> float | None:
    return units / duration_s if units and duration_s > 0 else None
