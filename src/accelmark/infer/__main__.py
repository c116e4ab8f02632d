"""``python -m accelmark.infer JOB.json``: the process of an inference job."""

from __future__ import annotations

import sys
from typing import Any

from accelmark.train.loop.rank import end_process, main


def _run(*arguments: Any) -> int:
    from accelmark.infer.run import run_inference  # imports the framework, whose errors belong in the rank's log

    return run_inference(*arguments)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], _run))
