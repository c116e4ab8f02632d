"""The training loop, the same for every framework, case and chip."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Optional

from accelmark.spec.errors import RunError, nearest
from accelmark.spec.job import TrainJob
from accelmark.spec.log.events import Evaluation, Event
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.checkpoint_writer import CheckpointWriter
from accelmark.train.loop.contract import Backend, Progress
from accelmark.train.loop.ends import Agreement, End, Vote, bound_reached, nonfinite_end, total_steps
from accelmark.train.loop.process import Stop
from accelmark.train.loop.window import ClosedWindow, GarbagePauses, RunTotals, Window

_HELD_NS: Final = 100_000_000
"""Closed windows are written together where they close more often than this: writing each would slow down training."""


Observer = Callable[[Evaluation], Optional[End]]
"""Observes every evaluation; may return an end, the same on every rank. Its time counts for no window or evaluation."""


class Driver:
    """Trains to an end; totals go to ``totals``, windows of steps to the log of ``backend``."""

    def __init__(
        self, job: TrainJob, backend: Backend, totals: RunTotals, stop: Stop, observer: Observer | None = None
    ) -> None:
        self._job, self._settings, self._backend, self._log = job, job.settings, backend, backend.log
        self._totals, self._stop, self._observer = totals, stop, observer
        self._window = Window(backend.clock, backend.losses)
        most_steps = job.settings.log_every_steps
        self._agreement = Agreement(backend.exchange_max, most_steps) if backend.world_size > 1 else None
        self._unread: list[ClosedWindow] = []
        self._garbage = GarbagePauses()
        self._num_retries = 0
        self._batches_writes = backend.immediate and self._agreement is None
        self._read_ns = 0
        self._opened_ns = self._opened_cpu_ns = 0
        self._learning_rate = 0.0
        self._nonfinite_step: int | None = None
        self._evaluated_step = -1
        self._checkpoints = CheckpointWriter(job, backend, backend.job.checkpoint_dir, backend.log, totals)
        self._first_step = 0
        self._deadline_ns = math.inf
        self._check_at = 0
        self._num_traced = 0
        self._traces_next = False

    @property
    def progress(self) -> Progress:
        """The progress of training."""
        return self._totals.progress

    def run(self) -> End:
        """Train until an end is reached, evaluate the final model, and return the end."""
        restored = self._backend.restore()
        if restored is not None:
            self._totals.progress = restored
            self._totals.num_samples_before = restored.num_trained_samples
        self._backend.synchronize()
        self._stop.interruptible = False
        self._garbage.start()
        try:
            self._start()
            end = self._train()
        except BaseException:
            self._write_delayed()
            raise
        finally:
            self._garbage.stop()
        end = self._conclude(end)
        self._checkpoints.settle()
        self._totals.train_end = time.monotonic()
        self._totals.peak_device_memory_mib = self._backend.peak_memory_mib()
        self._log.event(Event.TRAIN_END, {"global_steps": self.progress.global_steps, "end_reason": end.reason})
        if end.completed:
            self._checkpoints.finish()
        return end

    def _start(self) -> None:
        progress = self.progress
        self._totals.train_start = time.monotonic()
        limit_s = self._settings.end.max_duration_s
        self._opened_ns, self._opened_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        if limit_s is not None:
            self._deadline_ns = self._opened_ns + int(limit_s * 1e9)
        self._first_step = progress.global_steps
        self._checkpoints.start()
        if self._agreement is not None:
            self._agreement.next_step = progress.global_steps + 1
        backend = self._backend
        start = {
            "global_steps": progress.global_steps,
            "total_steps": total_steps(self._settings.end, backend.steps_per_epoch, backend.samples_per_step),
            "epoch": progress.epoch,
            "resumed": progress.global_steps > 0,
        }
        self._log.event(Event.TRAIN_START, start)

    def _train(self) -> End:
        if self.progress.reached and self._settings.end.at_target:
            return End("target")  # resumed from the final checkpoint
        bound = bound_reached(self._settings.end, self.progress, self._epochs_done())
        while bound is None:
            progress = self.progress
            if progress.step_in_epoch == self._backend.steps_per_epoch:
                progress.epoch += 1
                progress.step_in_epoch = 0
            steps = self._backend.open_epoch(progress.epoch, progress.step_in_epoch)
            self._log.event(Event.EPOCH_BEGIN, {"epoch": progress.epoch, "global_steps": progress.global_steps})
            end = self._epoch(steps)
            self._write_delayed()
            self._log.event(Event.EPOCH_END, {"epoch": progress.epoch, "global_steps": progress.global_steps})
            if end is not None:
                return end
        return End(bound)

    def _epoch(self, steps: Iterator[list[Any]]) -> End | None:
        """Train to the end of the epoch. The loop body is AccelMark's entire overhead per step."""
        backend, progress, stop, window = self._backend, self.progress, self._stop, self._window
        now, learning_rate = time.monotonic_ns, backend.learning_rate
        train = self._take_traced if self._traces_next else backend.step
        mark: Callable[[], Any] = (lambda: None) if backend.clock is None else backend.clock.mark
        own_end = backend.own_end or (lambda: None)
        add = window.add
        checks_alone = self._agreement is None
        checks_loss = checks_alone and backend.immediate
        samples = backend.samples_per_step
        self._check_at = self._next_check()
        for _ in range(backend.steps_per_epoch - progress.step_in_epoch):
            before = now()
            batches = next(steps, None)
            if batches is None:
                raise RunError(
                    f"epoch {progress.epoch} ended after {progress.step_in_epoch} of {backend.steps_per_epoch} steps: "
                    "the case's train_batches yields fewer batches than its num_samples says"
                )
            self._learning_rate = learning_rate()
            ready = now()
            start = mark()
            loss = train(batches)
            sample = add(start, own_end(), mark(), ready - before, loss)
            progress.global_steps += 1
            progress.step_in_epoch += 1
            progress.num_trained_samples += samples
            if (
                progress.global_steps >= self._check_at
                or (checks_alone and (stop.requested is not None or ready > self._deadline_ns))
                or (checks_loss and not math.isfinite(sample))
            ):
                end = self._check()
                if end is not None:
                    return end
                self._check_at = self._next_check()
                train = self._take_traced if self._traces_next else backend.step
        return None

    def _take_traced(self, batches: list[Any]) -> Any:
        loss, traced = self._backend.tracer.take(batches)
        if traced is not None:
            self._log.event(Event.STEP_TRACED, traced)
        self._num_traced, self._traces_next = self._num_traced + 1, False
        return loss

    def _next_check(self) -> int:
        """Return the next step after which :meth:`_check` must be called."""
        progress, settings = self.progress, self._settings
        step = progress.global_steps
        epoch_end = step + self._backend.steps_per_epoch - progress.step_in_epoch
        steps = [step + settings.log_every_steps - len(self._window), epoch_end]
        if settings.evaluate.every_steps is not None:
            steps.append((step // settings.evaluate.every_steps + 1) * settings.evaluate.every_steps)
        if settings.end.max_steps is not None:
            steps.append(settings.end.max_steps)
        if settings.end.max_samples is not None:
            left = settings.end.max_samples - progress.num_trained_samples
            steps.append(step + max(1, -(-left // self._backend.samples_per_step)))
        if self._agreement is not None:
            steps.append(step + 1 if self._traces_next else self._agreement.next_step)
        return int(min(*steps, self._checkpoints.next_due(step)))

    def _check(self) -> End | None:
        """Write a window, evaluate, save or end, as due after this step."""
        settings, progress = self._settings, self.progress
        step = progress.global_steps
        bound = bound_reached(settings.end, progress, self._epochs_done())
        evaluate = settings.evaluate
        evaluates = evaluate.every_steps is not None and step % evaluate.every_steps == 0
        if progress.step_in_epoch == self._backend.steps_per_epoch and evaluate.every_epochs is not None:
            evaluates = evaluates or (progress.epoch + 1) % evaluate.every_epochs == 0
        evaluates = evaluates and bound is None and not settings.loader.synthetic
        saves = self._checkpoints.is_due(step)
        if len(self._window) >= settings.log_every_steps or evaluates or saves:
            self._close_window(flush=evaluates or saves)
        end = self._stops(settled=False)
        if end is None and evaluates:
            end = self._evaluate()
        if end is None and saves:
            self._checkpoints.save_due()
        if end is None and bound is not None:
            end = End(bound)
        killed = self._job.killed
        is_due = killed is not None and not self._first_step and step >= killed.step
        if killed is not None and is_due and RankPlace.from_environment().rank == killed.rank:
            message = "this rank ends itself by SIGKILL: the job measures recovery from that"
            self._log.event(Event.WARNING, {"message": message, "global_steps": step})
            os.kill(os.getpid(), signal.SIGKILL)
        return end

    def _stops(self, *, settled: bool) -> End | None:
        """Return the end due to a signal, the time limit or a non-finite loss, agreed by all ranks."""
        tracer, is_late = self._backend.tracer, time.monotonic_ns() > self._deadline_ns
        if self._agreement is None:
            if self._backend.immediate and len(self._window) and self._window.last_is_nonfinite():
                self._close_window(flush=True)
            vote: Vote | None = Vote(self._nonfinite_step, self._stop.requested is not None, is_late)
        else:
            step = self.progress.global_steps
            num_steps = max(1, step - self._first_step)
            step_s, trace_s = self._totals.elapsed_s() / num_steps, 0.0 if tracer is None else tracer.cost_s
            own = Vote(self._nonfinite_step, self._stop.requested is not None, is_late, step_s, trace_s)
            if settled:
                vote = self._agreement.settle(own)
            else:
                vote = self._agreement.poll(step, own) if step >= self._agreement.next_step else None
                if vote is not None and tracer is not None:
                    self._traces_next = vote.allows_trace(num_steps, self._num_traced)
        if vote is None:
            return None
        if vote.nonfinite_step is not None:
            totals = self._totals
            return nonfinite_end(vote.nonfinite_step, totals.last_finite_loss, totals.last_finite_loss_step)
        if vote.cancelled:
            name = self._stop.requested or "a signal to another rank"
            return End("cancelled", f"ended by {name} after step {self.progress.global_steps}")
        return End("max_duration") if vote.overtime else None

    def _epochs_done(self) -> int:
        return self.progress.epoch + (self.progress.step_in_epoch == self._backend.steps_per_epoch)

    def _close_window(self, *, flush: bool) -> None:
        """Close the open window; write the one before, and this one too where the device has computed it."""
        if len(self._window):
            if self._backend.clock is None:
                self._backend.synchronize()
            now, cpu_ns = time.monotonic_ns(), time.process_time_ns()
            closed = self._window.close(
                now,
                **self.progress.counts(),
                learning_rate=self._learning_rate,
                wall_ms=round((now - self._opened_ns) / 1e6, 4),
                cpu_ms=round((cpu_ns - self._opened_cpu_ns) / 1e6, 4),
            )
            self._opened_ns, self._opened_cpu_ns = now, cpu_ns
            if not self._backend.immediate:
                self._write_closed_windows()
            self._unread.append(closed)
            if self._batches_writes and not flush and now - self._read_ns < _HELD_NS:
                return
        if flush or self._backend.immediate:
            self._write_closed_windows()

    def _write_closed_windows(self) -> None:
        self._read_ns = time.monotonic_ns()
        closed, self._unread = self._unread, []
        gc_ms = self._garbage.collect() if closed else 0.0
        for each in closed:
            window = self._window.read(each, gc_ms, self._new_retries)
            bad = self._totals.take(window)
            if self._nonfinite_step is None:
                self._nonfinite_step = bad
            self._log.event(Event.STEP_END, window, at_ns=each.closed_ns if self._backend.immediate else None)

    def _new_retries(self) -> int:
        before, self._num_retries = self._num_retries, self._backend.num_alloc_retries()
        return self._num_retries - before

    def _write_delayed(self) -> None:
        if self._batches_writes:
            self._write_closed_windows()

    def _evaluate(self) -> End | None:
        """Evaluate; returns an end if the target is reached. Its time counts for no window."""
        backend, progress, target = self._backend, self.progress, self._job.target
        backend.synchronize()
        start = time.monotonic()
        self._stop.interruptible = backend.world_size == 1
        metrics = backend.evaluate()
        self._stop.interruptible = False
        if target is not None and target.metric not in metrics:
            hint = nearest(target.metric, metrics)
            raise RunError(f"the case's evaluation returns no metric {target.metric!r}, its target's name ({hint})")
        reached = target is not None and target.reached(metrics[target.metric])
        ends = reached and self._settings.end.at_target
        if reached and not ends:
            self._checkpoints.save_target_checkpoint()
        duration_s = time.monotonic() - start
        self._totals.evaluation_s += duration_s
        progress.metrics = metrics
        progress.reached = progress.reached or reached
        self._evaluated_step = progress.global_steps
        evaluation = Evaluation(
            **progress.counts(),
            metrics=dict(metrics),
            duration_s=duration_s,
            elapsed_s=self._totals.elapsed_s(),
            reached=reached,
        )
        self._log.event(Event.EVALUATE, evaluation)
        end = self._observer(evaluation) if self._observer is not None else None
        self._opened_ns, self._opened_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        return End("target") if ends else end

    def _conclude(self, end: End) -> End:
        """Write the remaining windows, agree on the end with all ranks, and evaluate the final model."""
        self._backend.synchronize()
        self._close_window(flush=True)
        if end.completed:
            stops = self._stops(settled=True)
            end = stops if stops is not None and stops.reason == "nonfinite_loss" else end
        if end.reason == "cancelled" and self._settings.checkpoint.every_steps is not None:
            self._checkpoints.save_resumable()
        evaluated = self._evaluated_step == self.progress.global_steps
        if end.completed and not evaluated and not self._settings.loader.synthetic:
            end = self._evaluate() or end
        return end
