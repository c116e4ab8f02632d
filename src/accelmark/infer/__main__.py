"""``python -m accelmark.infer JOB.json``: the process of an inference job."""

from __future__ import annotations

import sys
from pkgutil import resolve_name

from accelmark.train.loop.rank import end_process, main

if __name__ == "__main__":
    # By name, since it imports the framework, whose errors belong in the rank's log.
    end_process(main(sys.argv[1:], lambda *job: int(resolve_name("accelmark.infer.run:run_inference")(*job))))
