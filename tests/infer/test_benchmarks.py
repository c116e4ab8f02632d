"""MMLU and GSM8K by lm-evaluation-harness through an engine: the scores of the harness's own ``hf`` model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.serving.benchmark_data import accelmark, write_gsm8k, write_mmlu, write_small_llama

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
