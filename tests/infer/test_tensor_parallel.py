"""A language model that an engine splits over several processes: its answers, and how a run ends when one fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from accelmark.infer.engine import ComputeDevice, EngineRequest, InferenceError, Slots, rows_of
from accelmark.infer.engine_process import EngineProcess
from accelmark.infer.language_model import load_model

PROMPTS = torch.randint(0, 251, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a Llama with two heads of queries for one of keys, and an odd vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("llama")
    shapes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 251}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**shapes, **heads)).save_pretrained(directory)
    return directory


@pytest.fixture
def processes() -> Iterator[list[EngineProcess]]:
    started: list[EngineProcess] = []
    yield started
    for each in started:
        each.is_busy = True
        each.close()


def started(directory: Path, work_dir: Path, num_devices: int) -> EngineProcess:
    """Return the engine ``eager`` with the model, in so many processes."""
    work_dir.mkdir(exist_ok=True)
    process = EngineProcess("eager", work_dir, 300.0, num_devices=num_devices)
    device = ComputeDevice(device_type="cpu", module=None, threads=1, required=True, collectives="gloo")
    process.wait_until_ready()
    assert process.call("open", "eager", None, device)["max_devices"] is None
    request = EngineRequest(
        model=load_model(directory) if num_devices == 1 else None, onnx_path=None, engine_path=None,
        example=(PROMPTS,), precision="fp32", device=device.device, device_type="cpu", threads=1,
        optimize_for="throughput", options={}, work_dir=work_dir, model_dir=directory,
    )  # fmt: skip
    process.compile(request, [])
    return process


def answers(process: EngineProcess) -> tuple[Tensor, Tensor]:
    """Return generated tokens and, from a window of calls, the log-likelihoods of the prompts."""
    tokens = torch.stack([found for _, found in process.generate(PROMPTS, 12)], 1)
    process.allocate_inputs(Slots(rows_of([PROMPTS]), len(PROMPTS), 1), (0, 2), [PROMPTS])
    rows, _ = process.warm_up([(0, len(PROMPTS)), (0, 2)])
    process.allocate_outputs(rows, len(PROMPTS))
    process.stage(0, [PROMPTS])
    window = process.run([(0, len(PROMPTS))])
    assert torch.allclose(process.pick([2])[0].clone(), window.outputs[0][2:], atol=1e-5)
    return tokens, window.outputs[0]


def test_two_processes_give_the_answers_of_one(llama: Path, tmp_path: Path, processes: list[EngineProcess]) -> None:
    processes += [started(llama, tmp_path / str(number), number) for number in (1, 2)]
    one, two = processes
    (tokens, nats), (split_tokens, split_nats) = answers(one), answers(two)
    assert torch.equal(split_tokens, tokens)
    assert torch.allclose(split_nats, nats, atol=1e-4)
    assert len(set(two.pids)) == 2
    assert two.usage()["peak_host_memory_mib"] > 1.5 * one.usage()["peak_host_memory_mib"]
    two.close()
    processes.remove(two)
    assert not any(map(psutil.pid_exists, two.pids))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (signal.SIGKILL, r"its process of rank 1 was ended by SIGKILL \(out of memory\?\) in step 6"),
        pytest.param(signal.SIGSTOP, r"did not answer for 5 s \(engine_timeout_s\) in step 6", marks=pytest.mark.heavy),
    ],
)
def test_a_process_that_dies_or_hangs_ends_the_others(
    llama: Path, tmp_path: Path, processes: list[EngineProcess], sent: signal.Signals, words: str
) -> None:
    process = started(llama, tmp_path, 2)
    processes.append(process)
    process.activity = "step 6 (infer)"
    process.limit_replies(5)
    threading.Timer(0.5, os.kill, (process.pids[1], sent)).start()
    began = time.monotonic()
    with pytest.raises(InferenceError, match=words):
        for _ in process.generate(PROMPTS, 100_000):
            pass
    assert time.monotonic() - began < 30
    process.close()
    processes.remove(process)
    assert not any(map(psutil.pid_exists, process.pids))
