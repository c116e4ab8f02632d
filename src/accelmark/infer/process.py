"""Reading the job, running its steps, and saying the last word however it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from accelmark.infer.steps import SevenSteps
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.events import Event
from accelmark.spec.inference.events import InferFinished
from accelmark.spec.job import JobSpec
from accelmark.spec.model import parse
from accelmark.spec.perflog import PerfLogWriter
from accelmark.spec.work import InferJob
from accelmark.train.loop.process import Cancelled, StopRequest

_EXITS: Final = {"completed": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}


def run_job(job_file: Path, node_dir: Path, rank: int, started: float) -> int:
    """Carry out ``job_file`` and return the exit code of this process.

    Args:
        job_file: a :class:`accelmark.spec.job.JobSpec`.
        node_dir: where files go.
        rank: for the log lines.
        started: when the process began, on the clock of ``time.monotonic``.

    Raises:
        RequestError: the job itself cannot be read.
    """
    log = PerfLogWriter(rank)
    log.event(Event.INIT_START, {"pid": os.getpid(), "job": str(job_file), "process_start_mono_ms": started * 1000})
    job, infer = _read(job_file)
    steps = SevenSteps(job, infer, node_dir, log.event, started)

    def overdue(signal_name: str) -> None:
        message = f"{signal_name}, and the step in hand ({steps.step}) did not end in time"
        log.event(Event.FINISHED, steps.summary("cancelled", message, steps.step))
        os._exit(EXIT_CANCELLED)

    StopRequest().install(overdue)
    finished = _finished(steps)
    if finished.message is not None:
        log.event(Event.ERROR, {"message": finished.message, "step": finished.failed_step})
    log.event(Event.FINISHED, finished)
    return _EXITS[finished.state]


def _read(job_file: Path) -> tuple[JobSpec, InferJob]:
    try:
        values = json.loads(job_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{job_file}: cannot be read as a job ({error})") from error
    job = parse(JobSpec, values, str(job_file))
    if not isinstance(job.work, InferJob):
        raise RequestError(f"{job_file}: is no inference job")
    return job, job.work


def _finished(steps: SevenSteps) -> InferFinished:
    try:
        return steps.run()
    except Cancelled as signal_name:
        return steps.summary("cancelled", f"stopped by {signal_name}", steps.step)
