"""Measure what large loads cost the load generator and its readers: prompts, a stage's requests, and their records.

``python -m benchmarks.serving_growth`` draws prompts with a tokenizer that it trains on this repository, sends a closed
loop of requests to :mod:`benchmarks.null_server`, and reads made-up records, each in its own process.
"""

from __future__ import annotations

import io
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np

from accelmark.results.rounds.load import measured_stage, read_requests
from accelmark.serving.answers import AnswerSample
from accelmark.serving.client.client import Client
from accelmark.serving.load import ServedModel, open_prompts
from accelmark.serving.request import Endpoint, Load
from accelmark.serving.stages import Stages
from accelmark.spec.log.inference import LoadStage, RequestRecord
from accelmark.spec.settings.serving import Lengths, PromptSettings, ServeSettings
from benchmarks.serving import machine, null_server, planned, table

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results" / "serving_growth.json"
_RATE: Final = 50.0
"""Requests per second of made-up records."""


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prompts(length: int, number: int) -> dict[str, float]:
    """Draw prompts of ``length`` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("src/**/*.py")))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=16_000, show_progress=False))
    model: Any = SimpleNamespace(
        tokens=lambda part: tokenizer.encode(part).ids, text=tokenizer.decode, prompt_text=lambda: text
    )
    source = open_prompts(PromptSettings(input=Lengths(mean=length)), model, "completions", 1)
    began = time.perf_counter()
    for _ in range(number):
        source.draw()
    return {"tokens": length, "prompts": number, "ms_per_prompt": 1e3 * (time.perf_counter() - began) / number}


def stage(number: int, num_tokens: int) -> dict[str, float]:
    """Send requests, 64 at a time."""
    model = cast(ServedModel, SimpleNamespace(tokens=None, directory=None))
    with null_server("--step-ms", "1") as url, Client(Endpoint(url, "null")) as client:
        sample = AnswerSample(16, random.Random(1))
        stages = Stages(client, model, lambda event, value: None, io.StringIO(), sample, lambda: None)
        stages.stream = cast(Any, SimpleNamespace(write=lambda line: None, flush=lambda: None))
        before_mib, before_s = peak_mib(), time.process_time()
        requests = (planned(each)._replace(requested_tokens=num_tokens) for each in range(number))
        done, _ = stages.run(Load(0, 1e4, 120.0, concurrency=64), requests)
        spent_s = time.process_time() - before_s
    return {
        "requests": number,
        "tokens": num_tokens,
        "requests_s": number / done.duration_s,
        "cpu_us_per_request": 1e6 * spent_s / number,
        "client_cpu_us_per_request": 1e6 * done.client_cpu_share * done.duration_s / number,
        "bytes_per_request": (peak_mib() - before_mib) * 2**20 / number,
    }


def records(number: int, num_tokens: int) -> Iterator[RequestRecord]:
    """Yield made-up records of a stage at a constant rate."""
    rng = np.random.default_rng(1)
    for each in range(number):
        gaps = rng.integers(9_000, 12_000, num_tokens - 1).tolist()
        due_s = each / _RATE
        first_s = due_s + 0.05 + 0.02 * rng.random()
        yield RequestRecord(
            stage=0, number=each, prompt=each, due_s=due_s, sent_s=due_s, first_s=first_s,
            end_s=first_s + sum(gaps) / 1e6, gaps_us=tuple(gaps), status="ok", http_status=200, finish_reason="length",
            input_tokens=512, output_tokens=num_tokens, requested_tokens=num_tokens, usage_input=512,
            usage_output=num_tokens, text_sha256="ab" * 32,
        )  # fmt: skip


def reading(path: Path, number: int, num_tokens: int) -> dict[str, float]:
    """Read the records of a stage, and compute its figures."""
    before_mib, began = peak_mib(), time.perf_counter()
    requests, _ = read_requests(path)
    read_s = time.perf_counter() - began
    load = LoadStage(
        stage=0, arrival="constant", concurrency=None, rate=_RATE, duration_s=number / _RATE, num_requests=number,
        begin_mono_s=0.0,
    )  # fmt: skip
    measured_stage(requests, load, ServeSettings(server="toy"), 1, None)
    return {
        "requests": number,
        "tokens": num_tokens,
        "file_mib": path.stat().st_size / 2**20,
        "read_s": read_s,
        "figures_s": time.perf_counter() - began - read_s,
        "peak_mib": peak_mib(),
        "bytes_per_output": (peak_mib() - before_mib) * 2**20 / (number * num_tokens),
    }


def alone(measure: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Measure in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        row = pool.submit(measure, *arguments).result()
    print(row, file=sys.stderr)
    return row


def main() -> None:
    found: dict[str, Any] = {"on": machine()}
    found["prompts"] = [alone(prompts, *size) for size in ((128, 300), (2048, 60), (32_768, 6))]
    found["stage"] = [alone(stage, *size) for size in ((100_000, 1), (20_000, 128))]
    found["reading"] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        for number, num_tokens in ((10_000, 128), (100_000, 128), (1_000_000, 8)):
            with path.open("w", encoding="utf-8") as file:
                file.writelines(record.model_dump_json() + "\n" for record in records(number, num_tokens))
            found["reading"].append(alone(reading, path, number, num_tokens))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("prompts", "stage", "reading"):
        print(f"\n{name}\n\n{table(found[name])}")


if __name__ == "__main__":
    main()
