"""``python -m benchmarks.fanout [--hosts 1,8,64] [--simulated 10,100,...]``: needs root; writes figures beside it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from accelmark.spec.cluster import ClusterSpec
from accelmark.telemetry.host import cpu_model
from benchmarks.fanout.bookkeeping import bookkeeping
from benchmarks.fanout.figure import write_figures
from benchmarks.fanout.simulated import measure
from benchmarks.fanout.steps import NUM_OPENSSH_COMMANDS, one_by_one, together
from tests.cluster.bed import Bed

HERE = Path(__file__).parent


def real(numbers: list[int], most_in_turn: int) -> list[dict[str, float]]:
    """Time both ways on namespace hosts, in one run."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="accelmark-fanout-") as directory:
        bed = Bed(Path(directory) / "bed", max(numbers))
        try:
            bed.up()
            for number in numbers:
                hosts = [{"address": bed.address(index), "label": f"n{index}"} for index in range(1, number + 1)]
                cluster = ClusterSpec.model_validate(
                    {"launcher": "ssh", "hosts": hosts, "key": bed.root / "key", "user": "root",
                     "known_hosts": bed.root / "known_hosts", "python": sys.executable, "min_disk_mib": 0}
                )  # fmt: skip
                begun = time.monotonic()
                asyncio.run(together(cluster, Path(directory) / f"a{number}", f"a{number}"))
                middle = time.monotonic()
                sample = min(number, most_in_turn)
                one_by_one(cluster, Path(directory) / f"b{number}", f"b{number}", sample)
                in_turn_s = (time.monotonic() - middle) * number / sample
                row = {"hosts": number, "accelmark_s": middle - begun, "one_by_one_s": in_turn_s, "in_turn": sample}
                figures.append(row | {"ratio": row["one_by_one_s"] / row["accelmark_s"]})
                print(figures[-1], file=sys.stderr, flush=True)
        finally:
            bed.down()
    return figures


def main() -> None:
    """Measure and write ``figures.json``, the curves and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fanout", description=__doc__)
    parser.add_argument("--hosts", default="1,8,64")
    parser.add_argument("--simulated", default="10,100,512,1024")
    parser.add_argument("--seconds", default="15,30", help="durations of the steady job, which has a line a second")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of each host in the steady job")
    rest = "hosts that are timed one by one; the rest by rule of three"
    parser.add_argument("--in-turn", type=int, default=8, help=rest)
    given = parser.parse_args()
    simulated = [int(number) for number in given.simulated.split(",")]
    found = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_model(),
        "openssh_commands_a_host": NUM_OPENSSH_COMMANDS,
        "cores": len(os.sched_getaffinity(0)),
        "load1_at_start": os.getloadavg()[0],
        "real": real([int(number) for number in given.hosts.split(",")], given.in_turn),
        "simulated": measure(simulated),
        "steady": [
            row
            for seconds in map(int, given.seconds.split(","))
            for row in measure(simulated[-2:], (seconds, given.ranks))
        ],
        "bookkeeping": bookkeeping([number for number in (10, 100, 1024) if number <= simulated[-1]], given.ranks, 10),
    }
    found["load1_at_end"] = os.getloadavg()[0]
    (HERE / "figures.json").write_text(json.dumps(found, indent=2) + "\n")
    write_figures(HERE, found)


if __name__ == "__main__":
    main()
