"""``python -m accelmark.infer JOB.json``: the process of an inference job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelmark.train.loop.process import process_start, redirect_output

_START = process_start()


def main(arguments: list[str]) -> int:
    """Run the job file given on the command line; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.infer JOB.json", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or Path.cwd())
    if "ACCELMARK_NODE_DIR" in os.environ:
        redirect_output(node_dir / f"rank{rank}.out.log")
    from accelmark.spec.errors import AccelmarkError

    try:
        return _run(Path(arguments[0]), node_dir, rank)
    except AccelmarkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code


def _run(job_file: Path, node_dir: Path, rank: int) -> int:
    """Run a job file and return the exit code; every run ends with the event FINISHED.

    Raises:
        RequestError: the job file is not readable or not an inference job.
    """
    from accelmark.infer.steps import SevenSteps
    from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RequestError
    from accelmark.spec.events import Event
    from accelmark.spec.job import InferJob, JobSpec
    from accelmark.spec.model import parse
    from accelmark.spec.perflog import PerfLogWriter
    from accelmark.train.loop.process import Cancelled, StopRequest

    log = PerfLogWriter(rank)
    log.event(Event.INIT_START, {"pid": os.getpid(), "job": str(job_file), "process_start_mono_ms": _START * 1000})
    try:
        values = json.loads(job_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{job_file}: not readable as a job: {error}") from error
    job = parse(JobSpec, values, str(job_file))
    if not isinstance(job.work, InferJob):
        raise RequestError(f"{job_file}: not an inference job")
    steps = SevenSteps(job, job.work, node_dir, log.event, _START)

    def overdue(signal_name: str) -> None:
        message = f"{signal_name}, and step {steps.step} did not finish in time"
        log.event(Event.FINISHED, steps.summary("cancelled", message, steps.step))
        os._exit(EXIT_CANCELLED)

    StopRequest().install(overdue)
    try:
        finished = steps.run()
    except Cancelled as signal_name:
        finished = steps.summary("cancelled", f"stopped by {signal_name}", steps.step)
    if finished.message is not None:
        log.event(Event.ERROR, {"message": finished.message, "step": finished.failed_step})
    log.event(Event.FINISHED, finished)
    return {"completed": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}[finished.state]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of engine runtimes may abort during Python's finalisation
