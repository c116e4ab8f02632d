"""``python -m accelmark.serving JOB.json``: the process of a serving job."""

from __future__ import annotations

import sys
from typing import Any

from accelmark.train.loop.rank import end_process, main


def _run(*arguments: Any) -> int:
    from accelmark.serving.rank import run_serving  # imports the client, whose errors belong in the rank's log

    return run_serving(*arguments)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], _run))
