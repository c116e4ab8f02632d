"""``python -m accelmark.train.external JOB.json``: one rank of an external trainer."""

from __future__ import annotations

import sys

from accelmark.train.loop.rank import end_process, main

if __name__ == "__main__":
    from accelmark.train.external.rank import run_external

    end_process(main(sys.argv[1:], run_external))
