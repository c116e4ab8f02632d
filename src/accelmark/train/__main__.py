"""``python -m accelmark.train JOB.json``: one rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from accelmark.train.loop.process import StopRequest, process_start, redirect_output

if TYPE_CHECKING:
    from accelmark.spec.job import JobSpec
    from accelmark.spec.perflog import PerfLogWriter

_START = process_start()

RunRank = Callable[["JobSpec", "PerfLogWriter", float, StopRequest], int]


def main(arguments: list[str], run: RunRank | None = None) -> int:
    """Run one rank of the job that ``arguments`` name, by AccelMark's loop or by ``run``; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.train JOB.json", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    node_dir = os.environ.get("ACCELMARK_NODE_DIR")
    if node_dir:
        redirect_output(Path(node_dir) / f"rank{rank}.out.log")
    from accelmark.spec.errors import AccelmarkError, RequestError
    from accelmark.spec.events import Event
    from accelmark.spec.job import JobSpec
    from accelmark.spec.model import parse
    from accelmark.spec.perflog import PerfLogWriter
    from accelmark.train.loop.account import Account
    from accelmark.train.loop.ends import End
    from accelmark.train.loop.rank import FinishedEvent, run_rank

    path = Path(arguments[0])
    log = PerfLogWriter(rank)
    try:
        began = {"pid": os.getpid(), "job": str(path), "process_start_mono_ms": round(_START * 1e3, 3)}
        log.event(Event.INIT_START, began)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"{path}: cannot be read as a job ({error})") from error
        return (run or run_rank)(parse(JobSpec, values, str(path)), log, _START, StopRequest())
    except AccelmarkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        FinishedEvent(log, Account(process_start=_START)).write(End("error", str(error)))
        return error.exit_code


def end(code: int) -> NoReturn:
    """End the process without Python's finalisation, in which a gloo thread that frees a tensor may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
