"""Measure the client of serving: its capacity against a server without a model, and the accuracy of its times.

``python -m benchmarks.serving capacity`` offers rising rates of requests with 128 streamed tokens to
:mod:`benchmarks.null_server` and reports what one process of the client sends and reads, and how late its loop is.

``python -m benchmarks.serving accuracy`` streams tokens at known times at 1, 100 and 1,000 streams and compares the
client's times with the times at which the server gave each event to the kernel; both use the same monotonic clock.

``python -m benchmarks.serving peers`` sends the same prompts to the same server with this client, with a plain loop on
aiohttp and, with ``--guidellm PROGRAM``, with GuideLLM, in turns, and compares their latencies.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from accelmark.serving.client.client import Client
from accelmark.serving.request import Endpoint, Load, PlannedRequest
from accelmark.spec.log.inference import LoadStage, RequestRecord
from benchmarks.null_server import allow_files

NUM_TOKENS: Final = 128
TIMEOUT_S: Final = 120.0
Errors = np.ndarray[Any, np.dtype[np.float64]]
RESULTS: Final = Path(__file__).parent / "results" / "serving.json"


@contextmanager
def null_server(*options: str) -> Iterator[str]:
    """Start a null server in a process of its own; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.null_server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def planned(number: int, due_s: float | None = None) -> PlannedRequest:
    """Return a request whose prompt has its number."""
    return PlannedRequest(number, number, f"#{number}# {'word ' * 100}", NUM_TOKENS, due_s)


def send(url: str, requests: Sequence[PlannedRequest], load: Load) -> tuple[LoadStage, list[RequestRecord]]:
    """Run a warm-up and a stage."""
    records: list[RequestRecord] = []
    with Client(Endpoint(url, "null")) as client:
        warm = Load(-1, 60.0, TIMEOUT_S, concurrency=4)
        client.run_stage([planned(10**6 + number) for number in range(8)], warm, lambda *ended: None)
        done = client.run_stage(requests, load, lambda _, record, text: records.append(record))
    failed = [record for record in records if record.status != "ok"]
    assert not failed, failed[0]
    return done, sorted(records, key=lambda record: record.number)


def capacity(rates: Sequence[float], seconds: float, step_ms: float) -> list[dict[str, float]]:
    """Offer each rate for some seconds."""
    rows = []
    for rate in rates:
        requests = [planned(number, number / rate) for number in range(int(rate * seconds))]
        with null_server("--step-ms", str(step_ms)) as url:
            done, records = send(url, requests, Load(0, seconds, TIMEOUT_S, "constant", rate=rate))
        chunks = sum(1 + len(record.gaps_us) for record in records)
        late_ms = [1e3 * ((record.sent_s or 0) - record.due_s) for record in records]
        cpu_s = done.client_cpu_share * done.duration_s
        rows.append(
            {
                "offered_requests_s": rate,
                "requests_s": len(records) / done.duration_s,
                "chunks_s": chunks / done.duration_s,
                "cpu_share": done.client_cpu_share,
                "cpu_us_per_chunk": 1e6 * cpu_s / chunks,
                "requests_per_cpu_s": len(records) / cpu_s,
                "chunks_per_cpu_s": chunks / cpu_s,
                "late_p99_ms": float(np.percentile(late_ms, 99)),
                "lag_p50_ms": done.lag_p50_ms or 0.0,
                "lag_p99_ms": done.lag_p99_ms or 0.0,
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def accuracy(streams: int, itl_ms: float, num_requests: int) -> dict[str, float]:
    """Compare the client's times with the server's.

    Of TTFT and of every arrival the error is that of the later end, from when the server wrote the event to when the
    client says it arrived; of ITL it is that of both ends. The medians and p99 are of the magnitudes.
    """
    with tempfile.TemporaryDirectory() as name:
        stamps = Path(name) / "stamps.jsonl"
        options = ["--ttft-ms", "50", "--itl-ms", str(itl_ms), "--jitter", "0.5", "--stamps", str(stamps)]
        with null_server(*options) as url:
            load = Load(0, 600.0, TIMEOUT_S, concurrency=streams)
            done, records = send(url, [planned(number) for number in range(num_requests)], load)
        lines = [json.loads(line) for line in stamps.read_text(encoding="utf-8").splitlines()]
    served = {line["number"]: line for line in lines}
    first_us: list[float] = []
    arrival_us: list[Errors] = []
    itl_us: list[Errors] = []
    for record in records:
        sent_us = np.array(served[record.number]["sent_ns"]) / 1e3
        begin_us = 1e6 * (done.begin_mono_s + (record.first_s or 0))
        errors = begin_us + np.cumsum((0, *record.gaps_us)) - sent_us
        first_us.append(errors[0])
        arrival_us.append(errors)
        itl_us.append(np.diff(errors))
    row: dict[str, float] = {"streams": streams, "requests": len(records), "itl_ms": itl_ms}
    kinds = {"ttft": np.array(first_us), "itl": np.concatenate(itl_us), "arrival": np.concatenate(arrival_us)}
    for kind, errors in kinds.items():
        row[f"{kind}_mean_us"] = float(errors.mean())
        row[f"{kind}_p50_us"] = float(np.median(np.abs(errors)))
        row[f"{kind}_p99_us"] = float(np.percentile(np.abs(errors), 99))
    row |= {"lag_p50_ms": done.lag_p50_ms or 0.0, "lag_p99_ms": done.lag_p99_ms or 0.0}
    row["cpu_share"] = done.client_cpu_share
    print(row, file=sys.stderr)
    return row


def machine() -> dict[str, str]:
    """Return what it was measured on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {"processor": cpu, "python": platform.python_version(), "load_before": Path("/proc/loadavg").read_text()[:4]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---:|' * len(rows[0])}"]
    for row in rows:
        cells = [
            f"{value:,.3g}"
            if isinstance(value, float) and abs(value) < 100
            else str(value)
            if isinstance(value, str)
            else f"{value:,.0f}"
            for value in row.values()
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["capacity", "accuracy", "peers"], nargs="+")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 250, 500])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guidellm", help="GuideLLM's program, of an environment of its own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    allow_files()
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    for what in options.what:
        before = machine()
        if what == "capacity":
            rows = capacity(options.rates, options.seconds, options.step_ms)
        elif what == "accuracy":
            rows = [accuracy(1, 10.0, 8), accuracy(100, 20.0, 300), accuracy(1000, 100.0, 1000)]
        else:
            from benchmarks.serving_peers import compare

            rows = compare(options.rounds, options.guidellm)
        found[what] = {"on": before, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\n{what}, {before}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
