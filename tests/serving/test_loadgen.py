"""LoadGen's scenarios with token latencies: real LoadGen, real client, servers and an engine of known behaviour."""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from accelmark.infer.generation import EngineClient
from accelmark.serving.answers import AnswerSample
from accelmark.serving.client.client import Client
from accelmark.serving.load import LoadPlan, ServedModel
from accelmark.serving.request import Endpoint
from accelmark.serving.stages import StageClient, Stages, TokenScenarios
from accelmark.spec.log.inference import LoadStage, TokenScenarioResult
from accelmark.spec.settings.serving import ServeSettings
from tests.serving.scripted_server import Peer, scripted_server

TEXT = " ".join(f"w{number}" for number in range(20000))
FIRST_S, GAP_S, NUM_TOKENS = 0.03, 0.005, 6
SETTINGS: dict[str, Any] = {
    "server": "toy",
    "prompts": {"input": {"mean": 4}, "output": {"mean": NUM_TOKENS}},
    "load": {"concurrency": [2], "max_requests": 6, "warmup_requests": 0, "duration_s": 60},
    "scenario_duration_s": 0.2,
    "scenario_queries": 8,
    "num_compared": 0,
}


class Words:
    directory = None
    words = tuple(TEXT.split())

    def tokens(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def text(self, tokens: list[int]) -> str:
        return "".join(f" {self.words[token]}" for token in tokens)

    def prompt_text(self) -> str:
        return TEXT


def answer(peer: Peer) -> None:
    peer.begin()
    time.sleep(FIRST_S)
    for number in range(NUM_TOKENS):
        peer.token(f"w{number} ", "length" if number == NUM_TOKENS - 1 else None)
        time.sleep(GAP_S)
    peer.event({"choices": [], "usage": {"completion_tokens": NUM_TOKENS}})
    peer.end()


def run(client: StageClient, tmp_path: Path, **more: Any) -> tuple[list[TokenScenarioResult], list[LoadStage]]:
    """Run the stage of the load and the scenarios; return their results and all stages."""
    settings, model = ServeSettings.model_validate(SETTINGS | more), cast(ServedModel, Words())
    emitted: list[tuple[str, Any]] = []
    emit = lambda event, value=None: emitted.append((event, value))  # noqa: E731
    plan = LoadPlan(settings, model)
    with (tmp_path / "requests.jsonl").open("w") as stream:
        stages = Stages(client, model, emit, stream, AnswerSample(0, random.Random(1)), lambda: None)
        plan.run(stages.run)
        TokenScenarios(settings, plan, stages, tmp_path, emit).run()
    return (
        [value for event, value in emitted if event == "TOKEN_SCENARIO"],
        [value for event, value in emitted if event == "LOAD_END"],
    )


def records(tmp_path: Path, stage: int) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "requests.jsonl").read_text().splitlines())
    return [record for record in lines if record["stage"] == stage]


def test_loadgen_measures_token_latencies_through_the_client(tmp_path: Path) -> None:
    slots = threading.Semaphore(4)

    def answer_in_a_slot(peer: Peer) -> None:
        with slots:
            answer(peer)

    with scripted_server(answer_in_a_slot) as url, Client(Endpoint(url, "toy")) as client:
        slo = {"ttft_ms": 500, "tpot_ms": 20_000, "share": 0.5}
        (server, offline), stages = run(client, tmp_path, slo=slo, scenarios=["server", "offline"])
    assert [stage.scenario for stage in stages][:2] == [None, "server"]
    assert stages[-1].scenario == "offline"
    held = [rate for rate, fine in server.tried if fine]
    assert server.queries_per_second == max(held, default=None)
    assert max(rate for rate, _ in server.tried) > max(held, default=0.0)  # four slots: the search is bounded
    assert server.ttft_ms["p50"] >= 1000 * FIRST_S
    assert server.tpot_ms["p50"] >= 1000 * GAP_S / 2
    assert server.num_failed == offline.num_failed == 0
    assert offline.tokens_per_second
    assert offline.queries_per_second == pytest.approx(offline.tokens_per_second / NUM_TOKENS, rel=0.02)
    own = records(tmp_path, server.stage)
    assert len(own) >= 8
    assert all(record["output_tokens"] == NUM_TOKENS for record in own)
    ttft_ms = sorted(1000 * (record["first_s"] - record["due_s"]) for record in own)
    assert server.ttft_ms["p50"] >= 0.9 * ttft_ms[len(own) // 2]  # LoadGen's includes the messages
    every = [record["prompt"] for stage in stages for record in records(tmp_path, stage.stage)]
    assert len(every) == len(set(every))
    assert (tmp_path / server.log_dir / "mlperf_log_summary.txt").is_file()


@pytest.mark.heavy
def test_a_limit_that_no_rate_holds_has_no_figure(tmp_path: Path) -> None:
    with scripted_server(answer) as url, Client(Endpoint(url, "toy")) as client:
        (result,), _ = run(client, tmp_path, slo={"ttft_ms": 1000 * FIRST_S / 2, "tpot_ms": 1000}, scenarios=["server"])
    assert result.tokens_per_second is None
    assert result.reason == "no tried rate held the limits"
    assert not any(held for _, held in result.tried)


def test_more_queries_at_once_than_files_may_be_open_are_all_answered(tmp_path: Path) -> None:
    with scripted_server(answer) as url, Client(Endpoint(url, "toy")) as client:
        resource.prlimit(client._processes[0].pid, resource.RLIMIT_NOFILE, (64, 64))
        (result,), stages = run(client, tmp_path, scenarios=["offline"], scenario_queries=150)
    assert (result.num_failed, stages[-1].num_requests >= 150) == (0, True), result.reason


def test_queries_that_fail_make_a_scenario_invalid(tmp_path: Path) -> None:
    def refuse(peer: Peer) -> None:
        answer(peer) if int(peer.body["prompt"].split()[0][1:]) % 3 else peer.error("503 Service Unavailable")

    with scripted_server(refuse) as url, Client(Endpoint(url, "toy")) as client:
        (result,), _ = run(client, tmp_path, scenarios=["offline"])
    assert result.num_failed > 0
    assert not result.valid
    assert "queries failed" in str(result.reason)


class Counting:
    """The process of an engine that counts upwards."""

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
        assert len(tokens) <= 4
        for number in range(num_tokens):
            time.sleep(0.002)
            yield time.monotonic_ns(), torch.full((len(tokens),), number)


def test_an_engine_generates_the_queries_of_loadgen_in_batches(tmp_path: Path) -> None:
    words = Words()
    client = EngineClient(Counting(), words.tokens, words.text, live_batch=4)  # type: ignore[arg-type]
    (result,), stages = run(client, tmp_path, scenarios=["offline"])
    assert result.tokens_per_second
    assert result.num_failed == 0
    assert stages[-1].num_requests >= 8
    own = records(tmp_path, result.stage)
    assert all(record["due_s"] <= record["sent_s"] <= record["first_s"] <= record["end_s"] for record in own)
    assert len({record["sent_s"] for record in own}) >= 3  # several batches
