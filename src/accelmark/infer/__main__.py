"""``python -m accelmark.infer JOB.json``: the one process of an inference run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from accelmark.train.loop.process import process_start, redirect_output

_START = process_start()


def main(arguments: list[str]) -> int:
    """Carry out the job that ``arguments`` name, and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.infer JOB.json", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or Path.cwd())
    if "ACCELMARK_NODE_DIR" in os.environ:
        redirect_output(node_dir / f"rank{rank}.out.log")
    from accelmark.infer.process import run_job
    from accelmark.spec.errors import AccelmarkError

    try:
        return run_job(Path(arguments[0]), node_dir, rank, _START)
    except AccelmarkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # runtimes of engines keep threads that can abort in Python's finalisation
