"""``python -m accelmark.frameworks.process_launcher ... -- COMMAND``: start the ranks of one host as processes.

For frameworks without a launcher of their own. When a rank fails, the others get SIGTERM, and SIGKILL after a grace
period; SIGTERM and SIGINT are passed on. ``ranks.json`` records how each rank ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK
from accelmark.spec.plugins.framework import LaunchRecord, RankPlace

_GRACE_S: Final = 30.0
_POLL_S: Final = 0.05


def main(arguments: Sequence[str]) -> int:
    """Start this host's ranks, wait for their end, and write ``ranks.json``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accelmark.frameworks.process_launcher", description=__doc__)
    parser.add_argument("command", nargs="+", help="the command of each rank, after --")
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="this host's number, from 0")
    given = parser.parse_args(arguments)
    record = run_ranks(given.command, given.nproc, given.nnodes, given.node_rank)
    path = Path(os.environ.get("ACCELMARK_NODE_DIR") or ".") / "ranks.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(record.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(path)
    for rank, code in record.exit_codes.items():
        print(f"rank {rank}: exit code {'unknown' if code is None else code}", flush=True)
    codes = set(record.exit_codes.values())
    if codes == {0}:
        return EXIT_OK
    return EXIT_CANCELLED if record.signal is not None or codes <= {0, EXIT_CANCELLED} else EXIT_FAILED


def run_ranks(command: Sequence[str], nproc: int, nnodes: int, node_rank: int) -> LaunchRecord:
    """Run ``nproc`` ranks until all have ended."""
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    first = node_rank * nproc
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    problem: str | None = None
    for local in range(nproc):
        place = RankPlace(first + local, local, nnodes * nproc, nproc)
        try:
            ranks[place.rank] = subprocess.Popen(command, env={**os.environ, **place.variables()})
        except OSError as error:
            problem = f"rank {place.rank} could not be started: {error}"
            break
    deadline: float | None = None
    while any(process.poll() is None for process in ranks.values()):
        failed = problem is not None or any(process.returncode for process in ranks.values())
        if deadline is None and (received or failed):
            deadline = time.monotonic() + _GRACE_S
            _signal_all(ranks, signal.SIGTERM)
        elif len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
            _signal_all(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    codes: dict[int, int | None] = {rank: process.returncode for rank, process in ranks.items()}
    codes |= {rank: None for rank in range(first, first + nproc) if rank not in codes}
    return LaunchRecord(exit_codes=codes, signal=received[0] if received else None, problem=problem)


def _signal_all(ranks: dict[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks.values():
        if process.poll() is None:
            process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
