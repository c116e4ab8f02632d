"""Clients of others on the same server with the same prompts: a loop on aiohttp as a person writes it, and GuideLLM.

``python -m benchmarks.serving_peers URL PROMPTS CONCURRENCY`` is that loop: it prints TTFT and the times of the last
token in a line of JSON for each request.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from accelmark.serving.client.client import Client
from accelmark.serving.request import Endpoint, Load, PlannedRequest

CONCURRENCY: Final = 8
NUM_REQUESTS: Final = 64
NUM_TOKENS: Final = 64
SERVER: Final = ("--ttft-ms", "50", "--itl-ms", "10", "--jitter", "0.3")

Times = dict[int, tuple[float, float]]
"""Of each request by its number: from sent to the first token, and from the first to the last, in ms."""


def has_text(line: bytes) -> bool:
    """Return whether a line of the stream is a token."""
    return line.startswith(b"data: {") and any(choice["text"] for choice in json.loads(line[6:])["choices"])


async def plain_loop(url: str, prompts: Path, concurrency: int) -> None:
    """Send all prompts."""
    import aiohttp

    left = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    left.reverse()

    async def work(session: aiohttp.ClientSession) -> None:
        while left:
            prompt = left.pop()
            body = {"model": "tiny", "prompt": prompt["prompt"], "max_tokens": NUM_TOKENS, "stream": True}
            begun = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as response:
                times = [time.perf_counter() async for line in response.content if has_text(line)]
            row = [prompt["number"], 1e3 * (times[0] - begun), 1e3 * (times[-1] - times[0])]
            print(json.dumps(row), flush=True)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))


def ours(url: str, prompts: Path, work: Path) -> Times:
    """Send the prompts with the client of AccelMark."""
    found: Times = {}
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    requests = [PlannedRequest(line["number"], line["number"], line["prompt"], NUM_TOKENS) for line in lines]
    with Client(Endpoint(url, "tiny")) as client:
        client.run_stage(
            requests,
            Load(0, 600.0, 120.0, concurrency=CONCURRENCY),
            lambda _, record, text: found.update(
                {record.number: (1e3 * ((record.first_s or 0) - (record.sent_s or 0)), sum(record.gaps_us) / 1e3)}
            ),
        )
    return found


def aiohttp_loop(url: str, prompts: Path, work: Path) -> Times:
    """Send them with the plain loop."""
    command = [sys.executable, "-m", "benchmarks.serving_peers", url, str(prompts), str(CONCURRENCY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {number: (ttft, further) for number, ttft, further in rows}


def guidellm(program: str) -> Callable[[str, Path, Path], Times]:
    """Return a function that sends them with GuideLLM."""

    def send(url: str, prompts: Path, work: Path) -> Times:
        out = work / "guidellm.json"
        backend = f"kind=openai_http,target={url},model=tiny,request_format=/v1/completions"
        command = [program, "run", "--backend", backend, "--profile", f"kind=concurrent,streams={CONCURRENCY}"]
        command += [
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--data",
            f"kind=json_file,path={prompts}",
        ]
        command += ["--output", f"kind=json,path={out}", "--disable-console"]
        subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, check=True)
        (benchmark,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
        found: Times = {}
        for request in benchmark["requests"]["successful"]:
            number = int(re.findall(r"#(\d+)#", request["request_args"])[0])
            further = request["inter_token_latency_ms"] * (request["output_tokens"] - 1)
            found[number] = request["time_to_first_token_ms"], further
        return found

    return send


def compare(rounds: int, program: str | None) -> list[dict[str, Any]]:
    """Let the clients take turns; return a row for each, with its errors against the server's own times."""
    from benchmarks.serving import null_server

    clients: dict[str, Callable[[str, Path, Path], Times]] = {"AccelMark": ours, "aiohttp": aiohttp_loop}
    if program is not None:
        clients["GuideLLM"] = guidellm(program)
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in clients}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        stamps, prompts = work / "stamps.jsonl", work / "prompts.jsonl"
        with prompts.open("w", encoding="utf-8") as stream:
            for number in range(NUM_REQUESTS):
                line = {"number": number, "prompt": f"#{number}# word word", "output_tokens_count": NUM_TOKENS}
                stream.write(json.dumps(line) + "\n")
        with null_server(*SERVER, "--stamps", str(stamps)) as url:
            for turn in range(rounds * len(clients)):
                name = list(clients)[(turn + turn // len(clients)) % len(clients)]
                skipped = stamps.stat().st_size if stamps.exists() else 0
                times = clients[name](url, prompts, work)
                with stamps.open(encoding="utf-8") as stream:
                    stream.seek(skipped)
                    served = {each["number"]: each for each in map(json.loads, stream)}
                for number, (ttft, further) in times.items():
                    sent = served[number]["sent_ns"]
                    true_ttft, true_further = (sent[0] - served[number]["arrived_ns"]) / 1e6, (sent[-1] - sent[0]) / 1e6
                    gaps = len(sent) - 1
                    found[name].append((ttft, further / gaps, ttft - true_ttft, 1e3 * (further - true_further) / gaps))
                print(name, len(times), file=sys.stderr)
    return [_row(name, np.array(rows)) for name, rows in found.items()]


def _row(name: str, rows: Any) -> dict[str, Any]:
    ttft, tpot, ttft_error, tpot_error_us = rows.T
    return {
        "client": name,
        "requests": len(rows),
        "ttft_p50_ms": float(np.median(ttft)),
        "tpot_p50_ms": float(np.median(tpot)),
        "ttft_more_than_served_p50_ms": float(np.median(ttft_error)),
        "ttft_more_than_served_p99_ms": float(np.percentile(ttft_error, 99)),
        "tpot_error_p50_us": float(np.median(np.abs(tpot_error_us))),
        "tpot_error_p99_us": float(np.percentile(np.abs(tpot_error_us), 99)),
    }


if __name__ == "__main__":
    asyncio.run(plain_loop(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
