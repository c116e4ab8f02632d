"""``python -m accelmark.train.external JOB.json``: one rank of an external trainer."""

from __future__ import annotations

import sys

from accelmark.train.__main__ import end, main

if __name__ == "__main__":
    from accelmark.train.external.rank import run_external

    end(main(sys.argv[1:], run_external))
