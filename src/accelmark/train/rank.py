"""One rank from its first event to its last: whatever happens in between, FINISHED is written once, at the end."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, nearest
from accelmark.spec.events import Event
from accelmark.spec.job import JobSpec
from accelmark.spec.perflog import EventLog, PerfLogWriter
from accelmark.spec.work import TrainJob
from accelmark.train.loop.account import Account
from accelmark.train.loop.contract import Backend
from accelmark.train.loop.driver import Driver, Judge
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import Cancelled, Stop, StopRequest

BACKENDS: Final = {
    "pytorch": ("accelmark.frameworks.pytorch.backend", "accelmark.frameworks.pytorch.platform", "PyTorchBackend")
}
"""Framework -> the module of its backend, the module of its ``Ranks``, and the class."""


@final
class LastWord:
    """Writes FINISHED exactly once, from whichever thread comes first."""

    def __init__(self, log: EventLog, account: Account) -> None:
        self._log = log
        self._account = account
        self._lock = threading.Lock()
        self._said = False

    def say(self, end: End) -> None:
        """Write FINISHED unless it stands already."""
        with self._lock:
            if self._said:
                return
            self._said = True
            self._log.event(Event.FINISHED, self._account.finished(end))


def run_rank(job: JobSpec, log: PerfLogWriter, process_start: float, stop: StopRequest) -> int:
    """Run this rank's part of the job, and return the exit code of its process: 0 only when it completed."""
    train = job.work if isinstance(job.work, TrainJob) else None
    account = Account(process_start=process_start, job=train)
    last_word = LastWord(log, account)

    def overdue(signal_name: str) -> None:
        last_word.say(End("cancelled", f"ended by {signal_name}, without waiting for the step in hand any longer"))
        os._exit(EXIT_CANCELLED)

    if threading.current_thread() is threading.main_thread() and stop.wanted:
        stop.install(overdue)
    carried = carry_out(train, lambda: _backend(job, log), log, account, stop)
    stop.finish()
    take_peak(account, carried.backend)
    last_word.say(carried.end)
    if carried.backend is not None:
        carried.backend.close(together=carried.in_step)
    sys.stdout.flush()
    sys.stderr.flush()
    return carried.exit_code


@final
@dataclass(frozen=True, slots=True)
class Carried:
    """How far a job was carried."""

    end: End
    backend: Backend | None
    """None where it could not even be made."""
    in_step: bool
    """Whether the ranks left the loop together, so that they can still exchange something."""
    exit_code: int


def carry_out(
    train: TrainJob | None,
    open_backend: Callable[[], Backend],
    log: EventLog,
    account: Account,
    stop: Stop,
    judge: Judge | None = None,
) -> Carried:
    """Prepare and train, and turn whatever goes wrong into an end; FINISHED is left to the caller."""
    backend: Backend | None = None
    code = EXIT_FAILED
    try:
        backend = open_backend()
        account.backend = backend
        log.event(Event.INIT_END, backend.prepare())
        if train is None:
            raise RequestError("job.json is no training job")
        end = Driver(train, backend, log, account, stop, judge).run()
        seen = backend.inspected()
        if seen is not None:
            log.event(Event.INSPECTED, seen)
    except Cancelled as cancelled:
        end = End("cancelled", f"ended by {cancelled}")
        in_step = False
    except Exception as error:  # noqa: BLE001 - every error has to end in FINISHED
        end = _explained(error, backend)
        in_step = False
        if isinstance(error, AccelmarkError):
            code = error.exit_code
        else:
            traceback.print_exc()
        _say_error(log, error, end)
    else:
        in_step = True
    code = EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else code
    return Carried(end, backend, in_step, code)


def _backend(job: JobSpec, log: EventLog) -> Backend:
    framework = job.key.framework
    if framework not in BACKENDS:
        raise RequestError(f"no training backend for framework {framework!r} ({nearest(framework, BACKENDS)})")
    if not isinstance(job.work, TrainJob):
        raise RequestError("job.json is no training job ")
    module, places, name = BACKENDS[framework]
    ranks = import_module(places).Ranks.from_environment()
    backend: Backend = getattr(import_module(module), name)(job, job.work, ranks, log)
    return backend


def _explained(error: Exception, backend: Backend | None) -> End:
    if backend is not None:
        return End(*backend.explain(error))
    return End("error", str(error) if isinstance(error, AccelmarkError) else f"{type(error).__name__}: {error}")


def _say_error(log: EventLog, error: Exception, end: End) -> None:
    log.event(Event.ERROR, {"type": type(error).__name__, "message": end.message})


def take_peak(account: Account, backend: Backend | None) -> None:
    """Note the largest allocation of a run that did not come to note it itself."""
    if account.peak_device_memory_mib is None and backend is not None:
        account.peak_device_memory_mib = backend.peak_memory_mib()
