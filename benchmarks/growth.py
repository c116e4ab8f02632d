"""Measure how summarising a run and writing its page scale with events and ranks: time, memory, size of the page.

Run from the repository's root; each measurement is a row, and runs in its own process to measure its peak memory:

    python -m benchmarks.growth                 # 10 thousand to 1 million events; 8 and 1,024 ranks
    python -m benchmarks.growth --ten-million   # 10 million events too (about 6 GB of disk)
    python -m benchmarks.growth --runs 10000000x8       # only these (events x ranks)
    python -m benchmarks.growth --json FILE     # add the figures to those in FILE, and plot them next to it

An event is one STEP_END line of four steps. The logs are generated (``tests/made_run.py``) and deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 4
"""Steps per window."""
FEW_RANKS = 64


@dataclass(frozen=True)
class Measured:
    """One run: its size, and the cost of reporting it."""

    events: int
    ranks: int
    log_mib: float
    summarise_s: float
    summarise_cpu_s: float
    """CPU time, which does not depend on other load of the machine."""
    page_s: float
    peak_memory_mib: float
    page_mib: float
    events_per_s: float
    verdict: str


def make(run_dir: Path, events: int, ranks: int) -> float:
    """Write a run with ``events`` windows over ``ranks`` ranks on hosts of 8; return the MiB of its logs."""
    from tests.made_run import Made, make_run

    nproc = min(ranks, 8)
    windows = max(events // ranks, 1)
    made = Made(
        nnodes=ranks // nproc, nproc=nproc, windows=windows, steps_per_window=STEPS, jitter=1.0, interval_s=1.0,
        eval_windows=(windows,), metrics=(0.95,), step_ms=9.0,
    )  # fmt: skip
    make_run(run_dir, made)
    return sum(path.stat().st_size for path in run_dir.rglob("*.out.log")) / 2**20


def measure(run_dir: Path, events: int, ranks: int, log_mib: float) -> Measured:
    """Summarise a run and write its page in this process."""
    from accelmark.report.run_page import write_page
    from accelmark.run.record.directory import measure_run

    began, cpu_began = time.perf_counter(), time.process_time()
    summary = measure_run(run_dir)
    summarised, cpu_s = time.perf_counter(), time.process_time() - cpu_began
    page = write_page(run_dir)
    ended = time.perf_counter()
    return Measured(
        events=events,
        ranks=ranks,
        log_mib=round(log_mib, 1),
        summarise_s=round(summarised - began, 2),
        summarise_cpu_s=round(cpu_s, 2),
        page_s=round(ended - summarised, 2),
        peak_memory_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        page_mib=round(page.stat().st_size / 2**20, 2),
        events_per_s=round(events / cpu_s),
        verdict=summary.cases[0].verdict,
    )


def in_own_process(events: int, ranks: int) -> Measured:
    """Make a run, then measure it in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="accelmark-growth-") as directory:
        run_dir = Path(directory) / "run"
        log_mib = make(run_dir, events, ranks)
        command = [
            sys.executable,
            "-m",
            "benchmarks.growth",
            "--one",
            str(run_dir),
            str(events),
            str(ranks),
            str(log_mib),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    values: dict[str, Any] = json.loads(done.stdout)
    return Measured(**values)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ten-million", action="store_true", help="measure 10 million events too")
    parser.add_argument("--runs", nargs="*", help="EVENTSxRANKS, in place of the usual ones")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_dir, events, ranks, log_mib = options.one
        print(json.dumps(asdict(measure(Path(run_dir), int(events), int(ranks), float(log_mib)))))
        return
    wanted = [(10_000, 8), (100_000, 8), (1_000_000, 8), (1_000_000, 1024)]
    if options.ten_million:
        wanted += [(10_000_000, 8), (10_000_000, 1024)]
    if options.runs:
        wanted = [(int(events), int(ranks)) for events, _, ranks in (run.partition("x") for run in options.runs)]
    heads = ("events", "ranks", "logs, MiB", "summary, s", "of CPU, s", "page, s", "peak memory, MiB", "page, MiB")
    print("| " + " | ".join((*heads, "events/CPU s")) + " |")
    print("| ---: " * (len(heads) + 1) + "|")
    found = []
    for events, ranks in wanted:
        one = in_own_process(events, ranks)
        found.append(one)
        times = (one.summarise_s, one.summarise_cpu_s, one.page_s)
        sizes = (one.peak_memory_mib, one.page_mib)
        cells = (f"{one.events:,}", f"{one.ranks:,}", one.log_mib, *times, *sizes, f"{one.events_per_s:,}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if options.json:
        write(found, options.json)


def write(found: list[Measured], path: Path) -> None:
    """Add figures to those in ``path``, and plot all of them."""
    entries = [Measured(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    by_size = {(one.events, one.ranks): one for one in (*entries, *found)}
    ordered = [by_size[size] for size in sorted(by_size)]
    path.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n")
    path.with_suffix(".svg").write_text(plot(ordered))


def plot(found: list[Measured]) -> str:
    """Plot CPU time and peak memory over events on logarithmic axes, as SVG."""
    panels = (
        ("processor time of reading and summarising, s", [(one, one.summarise_cpu_s) for one in found]),
        ("peak memory, MiB", [(one, one.peak_memory_mib) for one in found]),
    )
    drawn = "".join(panel(60 + 370 * number, title, points) for number, (title, points) in enumerate(panels))
    style = "text{font:11px sans-serif;fill:#333}line{stroke:#ccc}.few{fill:#2563eb}.many{fill:#d97706}"
    legend = '<circle cx="66" cy="326" r="4" class="few"/><text x="76" y="330">8 ranks</text>'
    legend += '<circle cx="146" cy="326" r="4" class="many"/><text x="156" y="330">1,024 ranks</text>'
    box = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 340" width="770" height="340"'
    return f'<svg {box}><style>{style}</style><rect width="770" height="340" fill="#fff"/>{drawn}{legend}</svg>\n'


def panel(left: float, title: str, points: list[tuple[Measured, float]]) -> str:
    """Draw one panel; its x axis covers four decades of events."""
    low = math.floor(math.log10(min(value for _, value in points)))
    high = math.ceil(math.log10(max(value for _, value in points)) + 1e-9)

    def x(events: float) -> float:
        return left + 75 * (math.log10(events) - 3.5)

    def y(value: float) -> float:
        return 270 - 220 * (math.log10(value) - low) / (high - low)

    parts = [f'<text x="{left}" y="30">{title}</text>']
    for decade in range(low, high + 1):
        at = y(10**decade)
        parts.append(f'<line x1="{left}" x2="{left + 300}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    parts += [
        f'<text x="{x(10**decade):.1f}" y="290" text-anchor="middle">{10**decade:,}</text>' for decade in range(4, 8)
    ]
    parts.append(f'<text x="{left + 150}" y="306" text-anchor="middle">events</text>')
    for one, value in points:
        kind = "many" if one.ranks > FEW_RANKS else "few"
        parts.append(f'<circle cx="{x(one.events):.1f}" cy="{y(value):.1f}" r="4" class="{kind}"/>')
    return "".join(parts)


if __name__ == "__main__":
    main()
