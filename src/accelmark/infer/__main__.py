"""``python -m accelmark.infer JOB.json``: the process of an inference job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accelmark.train.loop.rank import end_process, main

if TYPE_CHECKING:
    from accelmark.spec.job import JobSpec
    from accelmark.spec.log.perflog import EventLog
    from accelmark.train.loop.process import StopRequest


def _run(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    from accelmark.infer.run import run_inference  # imports the framework, whose errors belong in the rank's log

    return run_inference(job, log, process_start, stop)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], _run))
