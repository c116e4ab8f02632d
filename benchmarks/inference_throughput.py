"""Compare OpenVINO's calls at the same time with its own queue and with calls one after the other.

Run ``python -m benchmarks.inference_throughput [--quick] [--models MODEL...]`` on an idle machine; ``--quick`` writes
nothing. Rows are merged into ``results/inference_throughput.json`` and the table of ``inference.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bare_engine import MODELS
from benchmarks.inference import BATCHES, MAX_CALLS, PAGE, SLOW, Loaded, exported, loaded

RESULTS = Path(__file__).parent / "results" / "inference_throughput.json"
MARKS = ("<!-- throughput -->\n", "<!-- /throughput -->")
HEADS = ("model", "batch", "AsyncInferQueue, items/s", "AccelMark, items/s", "ratio", "calls at the same time",
         "one after the other, items/s", "ratio")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Items per second of OpenVINO's queue and of windows in both modes, and ratios with their intervals."""

    model: str
    batch: int
    queue: float
    throughput: float
    latency: float
    of_queue: tuple[float, float, float]
    of_latency: tuple[float, float, float]
    concurrency: int


def queue_s(engine: Loaded) -> float:
    """Return the seconds of a call in OpenVINO's own queue, on the inputs of the windows."""
    engine.process.call("prepare", calls=[(slot, engine.batch) for slot in range(engine.calls)])
    return float(engine.process.call("queue")) / engine.calls


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians of times, theirs over ours, with a bootstrap interval of 95 %."""
    chance, found = random.Random(1), []
    for _ in range(1000):
        picked = chance.choices(range(len(ours)), k=len(ours))
        medians = [statistics.median(times[each] for each in picked) for times in (theirs, ours)]
        found.append(medians[0] / medians[1])
    found.sort()
    return statistics.median(theirs) / statistics.median(ours), found[25], found[-25]


def compare(both: Loaded, single: Loaded, rounds: int, window_s: float) -> Row:
    """Run the queue and both modes alternately, in an order that changes every round; by the wall clock."""
    both.lay_out(8)
    single.lay_out(8)
    calls = round(window_s / min(single.window_s() for _ in range(3)))
    calls = max(8, min(MAX_CALLS, calls, 256 * 2**20 // (both.process.slots.size // 8)))
    both.lay_out(calls)
    single.lay_out(calls)
    kinds = (lambda: queue_s(both), both.window_s, single.window_s)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds):
        for kind in (*range(number % 3, 3), *range(number % 3)):
            times[kind].append(kinds[kind]())
    queue, ours, latency = (both.batch / statistics.median(each) for each in times)
    of_queue, of_latency = ratio(times[1], times[0]), ratio(times[1], times[2])
    return Row(both.name, both.batch, queue, ours, latency, of_queue, of_latency, both.process.concurrency)


def rows(models: Sequence[str], rounds: int, window_s: float) -> Iterator[Row]:
    """Compare for each model and batch size, on all cores."""
    threads = len(os.sched_getaffinity(0))
    for name in models:
        with tempfile.TemporaryDirectory() as text:
            directory = Path(text)
            model = exported(name, directory)
            for batch in BATCHES[:2] if name in SLOW else BATCHES:
                given = (name, "openvino", model, batch, directory)
                with (
                    loaded(*given, optimize_for="throughput", threads=threads) as both,
                    loaded(*given, optimize_for="latency", threads=threads) as single,
                ):
                    yield compare(both, single, rounds, window_s)


def keep(row: Row) -> None:
    """Merge a row into the JSON file, and write the table of the page."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    held[f"{row.model} {row.batch}"] = asdict(row)
    RESULTS.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for each in held.values():
        queue, single = ("{:.3f} ({:.3f} to {:.3f})".format(*each[kind]) for kind in ("of_queue", "of_latency"))
        lines.append(
            f"| {each['model']} | {each['batch']} | {each['queue']:,.0f} | {each['throughput']:,.0f} | {queue} "
            f"| {each['concurrency']} | {each['latency']:,.0f} | {single} |"
        )
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1], 1)[1]
    PAGE.write_text("".join((before, MARKS[0], "\n".join(lines), "\n", MARKS[1], after)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short rounds; writes nothing")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    for row in rows(given.models, *((4, 0.1) if given.quick else (15, 0.5))):
        print(row, flush=True)
        if not given.quick:
            keep(row)


if __name__ == "__main__":
    main()
