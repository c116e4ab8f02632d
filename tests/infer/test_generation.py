"""Offline generation: counted shapes, formulas of its figures, whole runs, and scores of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.infer.language_model import CausalModel
from accelmark.results.rounds.load import RequestTable, measured_stage
from accelmark.results.rounds.serving import generation_stage
from accelmark.spec.log.inference import LoadStage, RequestRecord
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import generation_load
from tests.serving.benchmark_data import accelmark, write_gsm8k, write_mmlu, write_small_llama

SHARED: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": False}
SHAPES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
CONFIGURATIONS = {
    "llama_mini": (192, 512, 4, 4, 4, 256),
    "llama3_1_8b": (4096, 14336, 32, 32, 8, 128256),
    "llama2_7b": (4096, 11008, 32, 32, 32, 32000),
    "deepseek_7b": (4096, 11008, 30, 32, 32, 102400),
    "aquila_7b": (4096, 11008, 32, 32, 32, 100008),
    "qwen2_5_7b": (3584, 18944, 28, 28, 4, 152064),
}
"""Shapes in the published ``config.json`` files."""


def llama(name: str = "llama_mini") -> CausalModel:
    import transformers

    kind = "Qwen2" if name.startswith("qwen") else "Llama"
    config = getattr(transformers, f"{kind}Config")(**dict(zip(SHAPES, CONFIGURATIONS[name], strict=True)), **SHARED)
    return CausalModel(getattr(transformers, f"{kind}ForCausalLM")(config))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_flops_of_a_case_are_those_of_its_published_shapes(name: str) -> None:
    with torch.device("meta"):
        costs = llama(name).costs()
    infer = load_case(name).infer
    assert infer is not None
    length = infer.parameters["seq_length"]
    assert isinstance(length, int)
    matrices = costs["body_parameters"] + costs["head_parameters"]
    expected = 2 * length * matrices + 4 * costs["attention_width"] * length**2
    assert InferSettings.model_validate(infer.configurations).flops == expected


def test_frequencies_of_positions_stay_in_fp32_when_the_model_is_converted() -> None:
    model = llama()
    before = model.model.model.rotary_emb.inv_freq.clone()
    converted = model.to(torch.bfloat16)
    assert converted.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(converted.model.model.rotary_emb.inv_freq, before)


def test_generation_continues_as_the_whole_text_would() -> None:
    torch.manual_seed(1)
    model = llama().train(False)
    prompts = torch.randint(0, 256, (3, 9))
    with torch.inference_mode():
        answers = torch.stack(list(model.generate(prompts, 6)), 1)
        whole = torch.cat([prompts, answers], 1)
        logits = model.model(input_ids=whole, use_cache=False).logits
        assert torch.equal(logits[:, 8:-1].argmax(-1), answers)
        nats = -logits[:, :-1].log_softmax(-1).gather(-1, whole[:, 1:, None])
        assert torch.allclose(model(whole), nats, atol=1e-4)


def test_prefill_and_decoding_are_measured_apart() -> None:
    """Batches of 2 prompts of 100 tokens: 0.5 s of prefill, then 10 steps of 0.1 s."""
    lengths: dict[str, Any] = {"generate_input_tokens": (100,), "generate_output_tokens": (11,)}
    settings = InferSettings(batch_size=1, compiler="eager", generate_batches=(2,), **lengths)
    records = [
        RequestRecord(
            stage=0, number=2 * batch + place, prompt=2 * batch + place, due_s=1.5 * batch, sent_s=1.5 * batch,
            first_s=1.5 * batch + 0.5, end_s=1.5 * batch + 1.5, gaps_us=(100_000,) * 10, status="ok",
            input_tokens=100, output_tokens=11, requested_tokens=11,
        )
        for batch in range(4)
        for place in range(2)
    ]  # fmt: skip
    load = LoadStage(
        stage=0, arrival="closed", concurrency=2, rate=None, input_tokens=100, output_tokens=11, begin_mono_s=0.0,
        duration_s=6.0, num_requests=8, lag_p50_ms=None, lag_p99_ms=None, client_cpu_share=0.0,
    )  # fmt: skip
    requests = RequestTable(records).requests()
    measured = measured_stage(requests, load, generation_load(settings), 1, 6.0)
    parameters = {"body_parameters": 900, "head_parameters": 100, "step_parameters": 1000}
    shapes = parameters | {"attention_width": 8, "cache_width": 4}
    stage = generation_stage(measured, requests, shapes, "bf16", 1e-6, 1e-4)
    assert stage.window_s == (0.0, 4.5)
    assert stage.label == "2 at a time, 100 + 11 tokens"
    assert stage.prefill_token_rate == pytest.approx(2 * 100 / 0.5)
    assert stage.decode_token_rate == pytest.approx(2 * 10 / 1.0)
    assert stage.quantile("ttft", "p50") == pytest.approx(500)
    assert stage.quantile("itl", "p50") == pytest.approx(100)
    assert stage.kv_cache_mib == pytest.approx(2 * 4 * 2 * 111 / 2**20)
    assert stage.prefill_mfu == pytest.approx(2 * (2 * (900 * 100 + 100) + 4 * 8 * 100**2) / 0.5 / 1e6)
    assert stage.decode_mfu == pytest.approx(2 * (2 * 1000 + 4 * 8 * 105.5) * 10 / 1e6)
    assert stage.decode_mbu == pytest.approx((2 * 1000 + 2 * 4 * 2 * 105.5) * 10 / 1e5)
    split = generation_stage(measured, requests, shapes, "bf16", 2e-6, 2e-4)
    assert split.prefill_mfu == pytest.approx((stage.prefill_mfu or 0) / 2)
    assert split.decode_mbu == pytest.approx((stage.decode_mbu or 0) / 2)
    assert split.kv_cache_mib == stage.kv_cache_mib
    without = generation_stage(measured, requests, {}, "bf16", 1.0, 1.0)
    assert without.decode_mbu is None
    assert without.prefill_token_rate == pytest.approx(400)


@pytest.mark.heavy
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_small_llama_generates_as_the_framework_does_on_one_device(tmp_path: Path, num_devices: int) -> None:
    few = ["--set", "generate_duration_s=1", "--set", "generate_batches=[1,8]", "--set", "generate_output_tokens=[16]"]
    few += ["--set", "inference_duration_s=0"]
    code, case, output = accelmark(tmp_path, "infer", f"llama_mini:pytorch:CPU:1:{num_devices}", *few)
    assert (code, case.get("state")) == (0, "succeeded"), output
    assert not [found for found in case["findings"] if found["severity"] == "error"], case["findings"]
    figures = {name: figure["mean"] for name, figure in case["figures"].items()}
    assert figures["validation_metric"] == pytest.approx(5.839, abs=0.01)
    assert figures["inference_metric"] == pytest.approx(6.4, abs=0.2)
    assert figures["answer_agreement"] > 0.9
    assert figures["prefill_tokens_per_second"] > figures["decode_tokens_per_second"] > 0
    assert figures["kv_cache_mib"] > 0
    rates = figures["output_tokens_per_second"], figures["output_tokens_per_second_per_device"]
    assert rates[0] == pytest.approx(num_devices * rates[1])
    records = [json.loads(line) for path in tmp_path.rglob("requests.jsonl") for line in path.read_text().splitlines()]
    assert {record["output_tokens"] for record in records} == {16}
    page = (tmp_path / "run/report.html").read_text()
    assert "Prefill" in page
    assert "64 + 16 tokens" in page
    others = list(tmp_path.rglob("engine.rank*.out.log"))
    assert len(others) == num_devices - 1
    assert not any("Traceback" in each.read_text() for each in others)


OWN = """
    import datasets, json, sys
    model, data, task = sys.argv[1:]
    hub = datasets.load_dataset
    datasets.load_dataset = lambda path, *a, **n: hub(f"{data}/{task}" if "/" in path else path, *a, **n)
    import lm_eval
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": model, "device": "cpu", "dtype": "float32"}, tasks=[task],
        num_fewshot=5, log_samples=False,
    )
    print(json.dumps({name: value for name, value in found["results"][task].items() if isinstance(value, float)}))
"""
"""The harness's own model, on the same weights and data."""


def test_an_engine_that_generates_no_text_is_refused_for_benchmarks(tmp_path: Path) -> None:
    settings = ["--set", "benchmarks=[mmlu]", "--set", "precision=fp32"]
    (tmp_path / "mmlu").mkdir()
    given = ["--data", str(tmp_path), "--compiler", "inductor", "--dry-run", *settings]
    _, _, output = accelmark(tmp_path, "infer", "llama_mini", *given)
    assert "inductor generates no text (engines that do: eager" in output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_mmlu(directory / "mmlu")
    write_gsm8k(directory / "gsm8k", 9)
    write_small_llama(directory / "llama3_1_8b")
    return directory


@pytest.fixture(scope="module")
def own(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    found = {}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("harness")), "OMP_WAIT_POLICY": "PASSIVE"}
    for task, metric in (("mmlu", "acc,none"), ("gsm8k", "exact_match,strict-match")):
        command = [sys.executable, "-c", textwrap.dedent(OWN), str(data / "llama3_1_8b"), str(data), task]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | offline)
        assert done.returncode == 0, done.stderr[-3000:]
        found[task] = float(json.loads(done.stdout.splitlines()[-1])[metric])
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("devices", [1, 2])
def test_scores_through_an_engine_are_those_of_the_harness(
    tmp_path: Path, data: Path, own: dict[str, float], devices: int
) -> None:
    assert 0 < own["mmlu"] < 1
    assert 0 < own["gsm8k"] < 1
    few = ["--set", "generate_duration_s=1", "--set", "generate_batches=[2]", "--set", "generate_input_tokens=[32]"]
    few += ["--set", "generate_output_tokens=[8]", "--set", "precision=fp32", "--set", "inference_duration_s=0"]
    _, case, output = accelmark(tmp_path, "infer", f"llama3_1_8b:pytorch:CPU:1:{devices}", "--data", str(data), *few)
    (file,) = (tmp_path / "run").rglob("result.json")
    result = json.loads(file.read_text())
    logs = "".join(each.read_text(errors="replace")[-3000:] for each in (tmp_path / "run").rglob("harness.log"))
    assert result["state"] == "succeeded", output + logs
    scores = {score["task"]: score for score in result["serving"]["scores"]}
    assert {task: (score["num_questions"], score["num_fewshot"]) for task, score in scores.items()} == {
        "mmlu": (114, 5), "gsm8k": (9, 5),
    }  # fmt: skip
    for task, score in scores.items():
        assert round(score["value"] * score["num_questions"]) == round(own[task] * score["num_questions"]), task
    found = {(each["severity"], each["rule"], each["actual"]) for each in case["findings"]}
    assert ("open", "benchmark-accuracy", "gsm8k: the data has 9 questions") in found
    assert ("error", "benchmark-accuracy", f"mmlu: {scores['mmlu']['value']:.4f}") in found
    assert case["verdict"] == "INVALID"
    assert "lm-evaluation-harness" in (tmp_path / "run/report.html").read_text()
