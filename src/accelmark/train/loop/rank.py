"""One rank of a job: ``python -m accelmark.train.loop.rank JOB.json``.

It runs from the event INIT_START to FINISHED, which every rank writes once, last, however it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError
from accelmark.spec.events import Evaluated, Event, Replayed
from accelmark.spec.job import CompareJob, EvaluateJob, JobSpec, TrainJob
from accelmark.spec.model import parse
from accelmark.spec.perflog import EventLog, PerfLogWriter
from accelmark.spec.plugins.catalog import find, folder_module
from accelmark.spec.plugins.framework import BACKEND_FILE, RankPlace
from accelmark.train.loop.account import Account
from accelmark.train.loop.contract import Backend
from accelmark.train.loop.driver import Driver, EvaluationObserver
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import Cancelled, Stop, StopRequest, process_start, redirect_output

RunRank = Callable[[JobSpec, PerfLogWriter, float, StopRequest], int]


@final
class FinishedEvent:
    """Writes FINISHED exactly once, from whichever thread is first."""

    def __init__(self, log: EventLog, account: Account) -> None:
        self._log = log
        self._account = account
        self._lock = threading.Lock()
        self._is_written = False

    def write(self, end: End) -> None:
        """Write FINISHED unless it is written already."""
        with self._lock:
            if self._is_written:
                return
            self._is_written = True
            self._log.event(Event.FINISHED, self._account.finished(end))


@final
@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How the work of a rank ended."""

    end: End
    backend: Backend | None
    """None where it could not be created."""
    in_step: bool
    """Whether the ranks ended together, so that they can still communicate."""
    exit_code: int


def run_rank(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run this rank's part of a job; returns the exit code of its process, 0 only when the work completed."""
    work = job.work
    train = work.train if isinstance(work, EvaluateJob | CompareJob) else work
    if not isinstance(train, TrainJob):
        raise RequestError(f"job.json: a training rank cannot do work of kind {work.kind!r}")
    account = Account(process_start=process_start, job=train)
    finished = FinishedEvent(log, account)

    def overdue(signal_name: str) -> None:
        finished.write(End("cancelled", f"ended by {signal_name}; the step in progress did not end in time"))
        os._exit(EXIT_CANCELLED)

    if threading.current_thread() is threading.main_thread() and stop.wanted:
        stop.install(overdue)

    def backend() -> Backend:
        return open_backend(job, train, log)

    if isinstance(work, EvaluateJob):
        outcome = run_work(backend, lambda opened: _evaluate(work, job.checkpoint_dir, opened, log), log, account)
    elif isinstance(work, CompareJob):
        outcome = run_work(backend, lambda opened: _take_first_steps(work, opened), log, account)
    else:
        outcome = run_training(train, backend, log, account, stop)
    stop.finish()
    record_peak_memory(account, outcome.backend)
    finished.write(outcome.end)
    if outcome.backend is not None:
        outcome.backend.close(together=outcome.in_step)
    return outcome.exit_code


def main(arguments: list[str], run: RunRank = run_rank) -> int:
    """Run one rank of the job that ``arguments`` name, by default that of a training job; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.train.loop.rank JOB.json", file=sys.stderr)
        return 2
    start, path = process_start(), Path(arguments[0])
    rank = RankPlace.from_environment().rank
    node_dir = os.environ.get("ACCELMARK_NODE_DIR")
    if node_dir:
        redirect_output(Path(node_dir) / f"rank{rank}.out.log")
    log = PerfLogWriter(rank)
    try:
        began = {"pid": os.getpid(), "job": str(path), "process_start_mono_ms": round(start * 1e3, 3)}
        log.event(Event.INIT_START, began)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"{path}: cannot be read as a job ({error})") from error
        return run(parse(JobSpec, values, str(path)), log, start, StopRequest())
    except AccelmarkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        FinishedEvent(log, Account(process_start=start)).write(End("error", str(error)))
        return error.exit_code


def end_process(code: int) -> NoReturn:
    """End the process without Python's finalisation, in which a gloo thread that frees a tensor may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_backend(job: JobSpec, train: TrainJob, log: EventLog) -> Backend:
    """Import the backend of the job's framework, and create it for this rank."""
    module = folder_module(find("frameworks", job.framework, "job.json"), BACKEND_FILE)
    backend: Backend = module.open_backend(job, train, RankPlace.from_environment(), log)
    return backend


def run_training(
    train: TrainJob,
    open_backend: Callable[[], Backend],
    log: EventLog,
    account: Account,
    stop: Stop,
    observer: EvaluationObserver | None = None,
) -> RankOutcome:
    """Train, and turn every error into an end; the caller writes FINISHED."""

    def body(backend: Backend) -> End:
        end = Driver(train, backend, log, account, stop, observer).run()
        found = backend.inspected()
        if found is not None:
            log.event(Event.INSPECTED, found)
        return end

    return run_work(open_backend, body, log, account)


def run_work(
    open_backend: Callable[[], Backend], body: Callable[[Backend], End], log: EventLog, account: Account
) -> RankOutcome:
    """Create and prepare a backend, run ``body`` with it, and turn every error into an end."""
    backend: Backend | None = None
    code = EXIT_FAILED
    in_step = False
    try:
        backend = open_backend()
        account.backend = backend
        log.event(Event.INIT_END, backend.prepare())
        end = body(backend)
        in_step = True
    except Cancelled as cancelled:
        end = End("cancelled", f"ended by {cancelled}")
    except Exception as error:  # noqa: BLE001 - every error has to end in FINISHED
        end = _end_of(error, backend)
        if isinstance(error, AccelmarkError):
            code = error.exit_code
        else:
            traceback.print_exc()
        log.event(Event.ERROR, {"type": type(error).__name__, "message": end.message})
    code = EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else code
    return RankOutcome(end, backend, in_step, code)


def _evaluate(work: EvaluateJob, checkpoints: Path, backend: Backend, log: EventLog) -> End:
    if work.weights is not None:
        start = time.monotonic()
        metrics = backend.evaluate(checkpoints / work.weights)
        duration_s = time.monotonic() - start
        value = Evaluated(weights=work.weights.name, metrics=dict(metrics), duration_s=duration_s)
        log.event(Event.EVALUATED, value)
    if work.checkpoint is not None:
        replay = backend.replay(checkpoints / work.checkpoint, work.num_steps)
        replayed = Replayed(
            checkpoint=work.checkpoint.name,
            first_step=replay.first_step,
            losses=tuple(replay.losses),
            update_norms=tuple(replay.update_norms),
        )
        log.event(Event.REPLAYED, replayed)
    return End("evaluated")


def _take_first_steps(work: CompareJob, backend: Backend) -> End:
    from accelmark.train.loop.comparison import take_first_steps  # NumPy, which a training rank does not need here

    take_first_steps(work, backend, RankPlace.from_environment())
    return End("max_steps")


def _end_of(error: Exception, backend: Backend | None) -> End:
    if backend is not None:
        return End(*backend.explain(error))
    return End("error", str(error) if isinstance(error, AccelmarkError) else f"{type(error).__name__}: {error}")


def record_peak_memory(account: Account, backend: Backend | None) -> None:
    """Record the largest allocation where training ended before the driver recorded it."""
    if account.peak_device_memory_mib is None and backend is not None:
        account.peak_device_memory_mib = backend.peak_memory_mib()


if __name__ == "__main__":
    from accelmark.train.loop import rank  # by its own name, so that monkey-patching of its functions is detected

    rank.end_process(rank.main(sys.argv[1:]))
