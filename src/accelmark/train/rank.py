"""One rank from its first event to its last: whatever happens in between, FINISHED is written once, at the end."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from importlib import import_module
from typing import Final, final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, nearest
from accelmark.spec.events import Event
from accelmark.spec.job import JobSpec
from accelmark.train.account import Account
from accelmark.train.backend import Backend
from accelmark.train.driver import Driver
from accelmark.train.ends import End
from accelmark.train.perflog import PerfLog
from accelmark.train.process import Cancelled, StopRequest

BACKENDS: Final = {"pytorch": ("accelmark.train.pytorch", "accelmark.train.platform", "PyTorchBackend")}
"""Framework -> the module of its backend, the module of its ``Ranks``, and the class."""


@final
class LastWord:
    """Writes FINISHED exactly once, from whichever thread comes first."""

    def __init__(self, log: PerfLog, account: Account) -> None:
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


def run_rank(job: JobSpec, log: PerfLog, process_start: float, stop: StopRequest) -> int:
    """Run this rank's part of the job, and return the exit code of its process: 0 only when it completed."""
    account = Account(process_start=process_start, job=job.train)
    last_word = LastWord(log, account)

    def overdue(signal_name: str) -> None:
        last_word.say(End("cancelled", f"ended by {signal_name}, without waiting for the step in hand any longer"))
        os._exit(EXIT_CANCELLED)

    if threading.current_thread() is threading.main_thread() and stop.wanted:
        stop.install(overdue)
    backend: Backend | None = None
    code = EXIT_FAILED
    try:
        backend = _backend(job, log)
        account.backend = backend
        log.event(Event.INIT_END, backend.prepare())
        if job.train is None:
            raise RequestError("job.json has no training side")
        end = Driver(job.train, backend, log, account, stop).run()
    except Cancelled as cancelled:
        end = End("cancelled", f"ended by {cancelled}")
        together = False
    except Exception as error:  # noqa: BLE001 - every error has to end in FINISHED
        end = _explained(error, backend)
        together = False
        if isinstance(error, AccelmarkError):
            code = error.exit_code
        else:
            traceback.print_exc()
        _say_error(log, error, end)
    else:
        together = True
    stop.finish()
    _take_peak(account, backend)
    last_word.say(end)
    if backend is not None:
        backend.close(together=together)
    sys.stdout.flush()
    sys.stderr.flush()
    return EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else code


def _backend(job: JobSpec, log: PerfLog) -> Backend:
    framework = job.key.framework
    if framework not in BACKENDS:
        raise RequestError(f"no training backend for framework {framework!r} ({nearest(framework, BACKENDS)})")
    if job.train is None:
        raise RequestError("job.json has no training side (train is null)")
    module, places, name = BACKENDS[framework]
    ranks = import_module(places).Ranks.from_environment()
    backend: Backend = getattr(import_module(module), name)(job, job.train, ranks, log)
    return backend


def _explained(error: Exception, backend: Backend | None) -> End:
    if backend is not None:
        return End(*backend.explain(error))
    return End("error", str(error) if isinstance(error, AccelmarkError) else f"{type(error).__name__}: {error}")


def _say_error(log: PerfLog, error: Exception, end: End) -> None:
    log.event(Event.ERROR, {"type": type(error).__name__, "message": end.message})


def _take_peak(account: Account, backend: Backend | None) -> None:
    if account.peak_device_memory_mib is None and backend is not None:
        account.peak_device_memory_mib = backend.peak_memory_mib()
