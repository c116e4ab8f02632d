"""One rank of an external trainer, and its output as events: ``python -m accelmark.train.external.rank JOB.json``."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from io import TextIOWrapper
from typing import Final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RequestError, raising
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.layers import flatten
from accelmark.spec.log.events import EndReason, Evaluation, Event, StepWindow
from accelmark.spec.log.perflog import PERFLOG_PREFIX, EventLog
from accelmark.spec.parallelism import mesh_of
from accelmark.spec.plugins.catalog import find
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.plugins.programs import fill
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import Cancelled, StopRequest
from accelmark.train.loop.rank import end_process, main
from accelmark.train.loop.window import RunTotals

_RATE_TOLERANCE: Final = 0.1
"""Largest relative difference between the trainer's throughput and AccelMark's before a warning."""
_MS: Final = {"s": 1000.0, "ms": 1.0}


class _UnreadableError(Exception):
    """A line matches a pattern, but a group in it is not a number."""


class LogTranslator:
    """Translates matching lines into events as they arrive.

    Times are those at which a line was read (``time.monotonic_ns``). Steps between two lines form one window: its loss
    is the printed one, and times of single steps are known only where every step is printed.
    """

    def __init__(self, work: ExternalJob, world_size: int, log: EventLog, totals: RunTotals, *, resumed: bool) -> None:
        self._work, self._log, self._totals = work, log, totals
        self._world_size, self._resumed = world_size, resumed
        spec = work.trainer.log
        self._step = re.compile(spec.step)
        self._evaluation = re.compile(spec.evaluation) if spec.evaluation else None
        self._training_started = re.compile(spec.training_started) if spec.training_started else None
        self._lock = threading.Lock()
        self.opened_ns = 0
        """When the current window opened: at first the start of the process."""
        self._last_ns = 0
        self._began_ns: int | None = None
        self._evaluation_ns = 0
        self._largest_gap = 1
        self._unreadable = ""
        """The first line that matches and could not be read."""
        self._num_unreadable = 0
        self._is_evaluated = False
        self._rates: list[tuple[float, float, float]] = []
        """Units per second that the trainer printed, units, and seconds of each window."""
        self._closed = False

    def line(self, text: str, at_ns: int) -> None:
        """Translate one line of output that was read at ``at_ns``."""
        with self._lock:
            if self._closed:
                return
            if self._began_ns is None and self._training_started is not None and self._training_started.search(text):
                self._begin(at_ns)
            try:
                if match := self._step.search(text):
                    self._take_step(_numbers(match), at_ns)
                elif self._evaluation is not None and (match := self._evaluation.search(text)):
                    self._take_evaluation(_numbers(match), at_ns)
            except _UnreadableError as error:
                self._num_unreadable += 1
                self._unreadable = self._unreadable or f"{text.strip()[:200]!r} ({error})"

    def _begin(self, at_ns: int) -> None:
        self._began_ns = self.opened_ns = at_ns
        self._totals.train_start = at_ns / 1e9
        self._log.event(Event.TRAIN_START, {"resumed": self._resumed}, at_ns=at_ns)

    def _take_step(self, numbers: dict[str, float], at_ns: int) -> None:
        progress, units = self._totals.progress, self._work.trainer.units
        step = round(numbers["step"])
        count = step - progress.global_steps
        if count <= 0:
            raise _UnreadableError(f"step {step} follows step {progress.global_steps}")
        step_ms = numbers["step_time"] * _MS[units.step_time] if "step_time" in numbers else None
        if self._began_ns is None:
            # Without the time of a step, initialisation counts as training, which makes throughput too low.
            first_ns = 0 if step_ms is None else at_ns - int(count * step_ms * 1e6)
            self._begin(max(self.opened_ns, first_ns))
        loss = numbers.get("loss")
        finite = loss if loss is not None and math.isfinite(loss) else None
        wall_ms = max(0.0, (at_ns - self.opened_ns - self._evaluation_ns) / 1e6)
        scale = self._world_size if units.samples == "rank" else 1
        if "samples" in numbers:
            samples = round(numbers["samples"] * scale)
        elif "tokens" in numbers:
            samples = round(numbers["tokens"] * scale / self._work.units_per_sample)
        else:
            samples = step * self._work.settings.samples_per_step(self._world_size)
        units_done = (samples - progress.num_trained_samples) * self._work.units_per_sample
        progress.global_steps = step
        progress.num_trained_samples = samples
        progress.epoch = max(0, round(numbers.get("epoch", 0)) - (units.epoch_from if "epoch" in numbers else 0))
        window = StepWindow(
            **progress.counts(),
            num_steps=count,
            learning_rate=numbers.get("learning_rate"),
            loss=finite,
            losses=() if loss is None else (finite,),
            step_ms=(step_ms,) if step_ms is not None and count == 1 else (),
            data_wait_ms=(),
            wall_ms=wall_ms,
        )
        self._totals.take(window)
        self._log.event(Event.STEP_END, window, at_ns=at_ns)
        if "throughput" in numbers:
            scale = self._world_size if units.throughput == "device" else 1
            self._rates.append((numbers["throughput"] * scale, units_done, wall_ms / 1e3))
        self._largest_gap = max(self._largest_gap, count)
        self.opened_ns = self._last_ns = at_ns
        self._evaluation_ns = 0

    def _take_evaluation(self, numbers: dict[str, float], at_ns: int) -> None:
        self._is_evaluated = True
        duration_s = numbers.pop("duration", 0.0)
        numbers.pop("step", None)
        metrics = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        target, totals = self._work.target, self._totals
        value = metrics.get(target.metric) if target is not None else None
        reached = target is not None and value is not None and target.reached(value)
        progress = totals.progress
        progress.metrics = {name: value for name, value in metrics.items() if value is not None}
        progress.reached = progress.reached or reached
        totals.evaluation_s += duration_s
        self._evaluation_ns += int(duration_s * 1e9)
        self._last_ns = at_ns
        evaluation = Evaluation(
            **progress.counts(),
            metrics=metrics,
            duration_s=duration_s,
            elapsed_s=0.0 if self._began_ns is None else (at_ns - self._began_ns) / 1e9,
            reached=reached,
        )
        self._log.event(Event.EVALUATE, evaluation, at_ns=at_ns)

    def close(self) -> None:
        """Write TRAIN_END and warnings; lines that come later are ignored."""
        with self._lock:
            self._closed = True
        if self._began_ns is not None:
            self._totals.train_end = self._last_ns / 1e9
            self._log.event(Event.TRAIN_END, at_ns=self._last_ns)
        if self._unreadable:
            message = f"{self._num_unreadable} lines of the trainer matched but could not be read"
            self._log.event(Event.WARNING, {"message": f"{message}, the first: {self._unreadable}"})
        needs_metric = self._work.target is not None and not self._work.settings.loader.synthetic
        if needs_metric and self._began_ns is not None and self._evaluation is not None and not self._is_evaluated:
            message = "no line of the trainer's output matched log.evaluation, so that no metric is known"
            self._log.event(Event.WARNING, {"message": message})
        rates = self._rates[1:]  # the first window may contain initialisation
        if seconds := sum(duration_s for _, _, duration_s in rates):
            measured = sum(units for _, units, _ in rates) / seconds
            printed = sum(rate * duration_s for rate, _, duration_s in rates) / seconds
            if abs(printed - measured) > _RATE_TOLERANCE * measured:
                message = f"the trainer prints {printed:.4g} {self._work.unit}s/s, but its steps make {measured:.4g}"
                self._log.event(Event.WARNING, {"message": message})

    def end(self) -> End:
        """Return how training ended, where the trainer's process ended with code 0."""
        steps, bounds = self._totals.progress.global_steps, self._work.settings.end
        if not steps:
            problem = "no line of its output matched log.step"
            if self._unreadable:
                problem = f"lines matched log.step but could not be read, the first: {self._unreadable}"
            return End("error", f"the trainer exited with code 0, but {problem}")
        if bounds.at_target and self._totals.progress.reached:
            return End("target")
        if bounds.max_steps is not None and steps + self._largest_gap <= bounds.max_steps:
            return End("error", f"the trainer exited with code 0 after step {steps} of {bounds.max_steps}")
        named: dict[EndReason, object] = {
            "max_steps": bounds.max_steps,
            "max_epochs": bounds.max_epochs,
            "max_samples": bounds.max_samples,
            "max_duration": bounds.max_duration_s,
        }
        return End(next(reason for reason, bound in named.items() if bound is not None))


def _numbers(match: re.Match[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, text in match.groupdict().items():
        if text is not None:
            with raising(_UnreadableError, f"{name} is not a number", ValueError):
                numbers[name] = float(text.replace(",", ""))
    return numbers


_TERMINATE_S: Final = 10.0
"""Time between SIGTERM and SIGKILL for the trainer; shorter than the rank's own grace period."""
_DRAIN_S: Final = 5.0
"""Longest wait for further output after the trainer ended; a process that it left running may keep its output open."""


def run_external(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run this rank of the job's trainer; returns the exit code of this process, 0 only when training completed."""
    work = job.work
    if not isinstance(work, ExternalJob):
        raise RequestError(f"job.json: an external trainer cannot do work of kind {work.kind!r}")
    work = work if job.seed is None else work.with_seed(job.seed)
    place = RankPlace.from_environment()
    command = trainer_command(job, work, place)
    totals = RunTotals(process_start=process_start, job=work)
    counted = place.rank == (0 if work.trainer.log.rank == "first" else place.world_size - 1)
    translator = LogTranslator(work, job.key.world_size, log, totals, resumed=job.resume) if counted else None
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, **work.trainer.environment}
    trainer = _Trainer(command, environment, translator, log, job.resume)

    def overdue(signal_name: str) -> None:
        trainer.signal(signal.SIGKILL)
        totals.write_finished(End("cancelled", f"ended by {signal_name}; the trainer did not end in time"), log)
        os._exit(EXIT_CANCELLED)

    stop.install(overdue)
    end = trainer.run()
    stop.finish()
    totals.write_finished(end, log)
    return EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else EXIT_FAILED


def trainer_command(job: JobSpec, work: ExternalJob, place: RankPlace) -> list[str]:
    """Return the command of one rank: the template, and the arguments of the case and of the settings."""
    trainer, key = work.trainer, job.key
    folder = find("trainers", trainer.name, "job.json").path
    settings = flatten(work.settings.model_dump(mode="json"))
    mesh = mesh_of(work.settings.parallelism, key.world_size, key.nproc)
    values = {
        **{name: str(value) for name, value in place._asdict().items()},
        "python": sys.executable,
        "nnodes": str(key.nnodes),
        "nproc": str(key.nproc),
        "model": key.model,
        "precision": work.settings.precision,
        "trainer_dir": str(folder.parent if folder.is_file() else folder),
        "case_dir": str(job.case.path),
        "checkpoint_dir": str(job.checkpoint_dir),
        "node_dir": os.environ.get("ACCELMARK_NODE_DIR", "."),
        **{f"data:{name}": str(path) for name, path in job.data_dirs.items()},
        **{f"setting:{name}": str(value) for name, value in settings.items()},
        **{f"env:{name}": value for name, value in os.environ.items()},
        "global_batch_size": str(work.settings.samples_per_step(key.world_size)),
        **{f"mesh:{axis}": str(degree) for axis, degree in asdict(mesh).items()},
    }
    flags = [part for name, flag in trainer.settings.items() for part in flag.render(settings.get(name))]
    template = (*trainer.command, *trainer.cases[key.model])
    try:
        return [*fill(template, values), *flags, *(fill(trainer.resume, values) if job.resume else [])]
    except KeyError as error:
        problem = f"trainer {trainer.name}: placeholder {{{error.args[0]}}} has no value"
        hint = "; set it in the environment of the cluster file" if str(error.args[0]).startswith("env:") else ""
        raise RequestError(f"{problem}{hint}") from error


@dataclass
class _Trainer:
    """The trainer's process, and the thread that reads its output; without a translator, that output does not count."""

    command: list[str]
    environment: Mapping[str, str]
    translator: LogTranslator | None
    log: EventLog
    resumed: bool
    _last_lines: deque[str] = field(default_factory=partial(deque, maxlen=20))
    _process: subprocess.Popen[bytes] | None = None

    def run(self) -> End:
        try:
            code = self._exit_code()
        except OSError as error:
            problem = f"the trainer's program {self.command[0]!r} cannot be started: {error.strerror}"
            return self._failed(f"{problem}; check its requirements")
        except Cancelled as cancelled:
            self.signal(signal.SIGTERM)
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERMINATE_S)
            self._close()
            return End("cancelled", f"ended by {cancelled}")
        self._close()
        if code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            last = self._last_lines[-1].strip() if self._last_lines else "it printed nothing"
            return self._failed(f"the trainer {how}: {last[:500]}")
        end = self.translator.end() if self.translator is not None else End("max_steps")
        return end if end.completed else self._failed(end.message or end.reason)

    def _exit_code(self) -> int:
        started_ns = time.monotonic_ns()
        # in its own session, so that every process that the trainer starts can be ended
        process = self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        if self.translator is not None:
            self.translator.opened_ns = started_ns
        else:
            self.log.event(Event.TRAIN_START, {"resumed": self.resumed})
        reader = threading.Thread(target=self._read, args=(process,), name="trainer output", daemon=True)
        reader.start()
        while True:
            try:
                code = process.wait(5.0)
            except subprocess.TimeoutExpired:
                if self.translator is None:
                    self.log.event(Event.HEARTBEAT)
            else:
                reader.join(_DRAIN_S)
                return code

    def _close(self) -> None:
        self.signal(signal.SIGKILL)
        if self.translator is not None:
            self.translator.close()
        else:
            self.log.event(Event.TRAIN_END)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        # Universal newlines: progress bars end lines with a carriage return.
        output = TextIOWrapper(process.stdout, encoding="utf-8", errors="replace", newline=None)
        while line := output.readline(2**16):
            if not (text := line.rstrip("\n")):
                continue
            read_ns = time.monotonic_ns()
            self._last_lines.append(text)
            # A trainer must not write PerfLog events itself.
            os.write(1, text.replace(PERFLOG_PREFIX, "[PerfLog of the trainer] ").encode(errors="replace") + b"\n")
            if self.translator is not None:
                self.translator.line(text, read_ns)

    def _failed(self, message: str) -> End:
        self.log.event(Event.ERROR, {"type": "TrainerError", "message": message, "last_lines": list(self._last_lines)})
        return End("error", message)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], run_external))
