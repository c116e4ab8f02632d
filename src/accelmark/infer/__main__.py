"""The process of an inference run: ``python -m accelmark.infer <job.json>``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelmark.infer.failures import end_reason_of
from accelmark.infer.steps import SevenSteps
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RunError
from accelmark.spec.events import Event
from accelmark.spec.infer_events import InferFinished
from accelmark.spec.job import JobSpec
from accelmark.spec.model import parse
from accelmark.train.perflog import PerfLog
from accelmark.train.process import Cancelled, StopRequest, process_start, redirect_output

_EXITS = {"completed": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}


def run(job_file: Path, node_dir: Path, rank: int) -> int:
    """Carry out ``job_file`` and return the exit code of this process.

    Raises:
        AccelmarkError: the job itself cannot be read.
    """
    started = process_start()
    log = PerfLog(rank)
    job = _read(job_file)
    if job.infer is None:
        raise RunError(f"{job_file}: is no inference job")
    steps = SevenSteps(job, job.infer, node_dir, log.event, started)

    def overdue(signal_name: str) -> None:
        log.event(Event.FINISHED, steps.summary("cancelled", f"{signal_name}; the step in hand did not end in time"))
        os._exit(EXIT_CANCELLED)

    StopRequest().install(overdue)
    finished = _finished(steps)
    if finished.message is not None:
        log.event(Event.ERROR, {"message": finished.message, "step": finished.failed_step})
    log.event(Event.FINISHED, finished)
    return _EXITS[finished.state]


def _read(job_file: Path) -> JobSpec:
    try:
        values = json.loads(job_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{job_file}: cannot be read: {error}") from error
    return parse(JobSpec, values, str(job_file))


def _finished(steps: SevenSteps) -> InferFinished:
    try:
        return steps.run()
    except Cancelled as signal_name:
        return steps.summary("cancelled", f"stopped by {signal_name}", steps.step)
    except KeyboardInterrupt:
        return steps.summary("cancelled", "stopped from the keyboard", steps.step)
    except MemoryError as error:  # raised where a step's own handler found no memory either
        return steps.summary(end_reason_of(error), str(error), steps.step)


def main(arguments: list[str]) -> int:
    """Run the job named on the command line, its output in ``rank<R>.out.log`` of the node's directory."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m accelmark.infer JOB.json\n")
        return 2
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR", Path.cwd()))
    rank = int(os.environ.get("RANK", "0"))
    redirect_output(node_dir / f"rank{rank}.out.log")
    return run(Path(arguments[0]), node_dir, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
