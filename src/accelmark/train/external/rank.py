"""One rank of an external trainer, as a child process: ``python -m accelmark.train.external.rank JOB.json``."""

from __future__ import annotations

import contextlib
import os
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
from typing import Final, final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.layers import flatten
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PERFLOG_PREFIX, EventLog
from accelmark.spec.parallelism import mesh_of
from accelmark.spec.plugins.catalog import find
from accelmark.spec.plugins.trainer import fill
from accelmark.train.external.translate import LogTranslator
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import Cancelled, StopRequest
from accelmark.train.loop.rank import end_process, main
from accelmark.train.loop.window import FinishedEvent, RunTotals

_MAX_LINE_CHARACTERS: Final = 2**16
_LAST_LINES: Final = 20
_HEARTBEAT_S: Final = 5.0
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
    place = {name: int(os.environ.get(name.upper(), default)) for name, default in _PLACE.items()}
    command = trainer_command(job, work, place)
    totals = RunTotals(process_start=process_start, job=work)
    finished = FinishedEvent(log, totals)
    counted = place["rank"] == (0 if work.trainer.log.rank == "first" else place["world_size"] - 1)
    translator = LogTranslator(work, job.key.world_size, log, totals, resumed=job.resume) if counted else None
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, **work.trainer.environment}
    trainer = _Trainer(command, environment, translator, log, job.resume)

    def overdue(signal_name: str) -> None:
        trainer.signal(signal.SIGKILL)
        finished.write(End("cancelled", f"ended by {signal_name}; the trainer did not end in time"))
        os._exit(EXIT_CANCELLED)

    if threading.current_thread() is threading.main_thread() and stop.wanted:
        stop.install(overdue)
    end = trainer.run()
    stop.finish()
    finished.write(end)
    return EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else EXIT_FAILED


_PLACE: Final = {"rank": 0, "local_rank": 0, "world_size": 1}
"""Placeholder of a rank's position -> its value where the launch sets no variable of that name."""


def trainer_command(job: JobSpec, work: ExternalJob, place: Mapping[str, int]) -> list[str]:
    """Return the command of one rank: the template, and the arguments of the case and of the settings."""
    trainer, key = work.trainer, job.key
    folder = find("trainers", trainer.name, "job.json").path
    settings = flatten(work.settings.model_dump(mode="json"))
    mesh = mesh_of(work.settings.parallelism, key.world_size, key.nproc)
    values = {
        **{name: str(value) for name, value in place.items()},
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
        resume = fill(trainer.resume, values) if job.resume else []
        return [*fill(template, values), *flags, *resume]
    except KeyError as error:
        problem = f"trainer {trainer.name}: placeholder {{{error.args[0]}}} has no value"
        hint = "; set it in the environment of the cluster file" if str(error.args[0]).startswith("env:") else ""
        raise RequestError(f"{problem}{hint}") from error


@final
@dataclass
class _Trainer:
    """The trainer's process, and the thread that reads its output.

    Ranks whose output does not count have no translator; they write TRAIN_START, HEARTBEAT and TRAIN_END.
    """

    command: list[str]
    environment: Mapping[str, str]
    translator: LogTranslator | None
    log: EventLog
    resumed: bool
    _last_lines: deque[str] = field(default_factory=partial(deque, maxlen=_LAST_LINES))
    _process: subprocess.Popen[bytes] | None = None

    def run(self) -> End:
        """Run the trainer to its end, and return how it ended."""
        try:
            code = self._exit_code()
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            problem = "was not found" if is_missing else f"cannot be started: {error.strerror}"
            return self._failed(f"the trainer's program {self.command[0]!r} {problem}; check its requirements")
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
        """Start the process, and return its exit code, negative for a signal. Raises OSError where it cannot start."""
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
            self.translator.start_at(started_ns)
        else:
            self.log.event(Event.TRAIN_START, {"resumed": self.resumed})
        reader = threading.Thread(target=self._read, args=(process,), name="trainer output", daemon=True)
        reader.start()
        while True:
            try:
                code = process.wait(_HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                if self.translator is None:
                    self.log.event(Event.HEARTBEAT)
            else:
                reader.join(_DRAIN_S)
                return code

    def _close(self) -> None:
        """End the trainer's remaining processes, and write the end of training."""
        self.signal(signal.SIGKILL)
        if self.translator is not None:
            self.translator.close()
        else:
            self.log.event(Event.TRAIN_END)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the trainer's session."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            raise RuntimeError("the trainer's output is not a pipe")
        # Universal newlines: progress bars end lines with a carriage return.
        output = TextIOWrapper(process.stdout, encoding="utf-8", errors="replace", newline=None)
        while line := output.readline(_MAX_LINE_CHARACTERS):
            if not (text := line.rstrip("\n")):
                continue
            read_ns = time.monotonic_ns()
            self._last_lines.append(text)
            # A trainer must not write PerfLog events itself.
            os.write(1, text.replace(PERFLOG_PREFIX, "[PerfLog of the trainer] ").encode(errors="replace") + b"\n")
            if self.translator is not None:
                self.translator.line(text, read_ns)

    def _failed(self, message: str) -> End:
        fields = {"type": "TrainerError", "message": message, "last_lines": list(self._last_lines)}
        self.log.event(Event.ERROR, fields)
        return End("error", message)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], run_external))
