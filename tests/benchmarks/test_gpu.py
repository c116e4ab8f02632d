from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_gpu_benchmark_measures_and_says_what_it_left_out(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--tiny", "--only", "llama", "llama_giant"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads((tmp_path / "out" / "gpu.json").read_text())
    measured, left_out = content["workloads"]
    assert measured["state"] == "succeeded"
    assert measured["settings"]["model.num_layers"] == 2
    assert measured["steady"]["throughput"] > 0
    assert measured["figures"]["throughput_whole"]["value"] > 0
    assert measured["overhead"]["bare_step_ms"] > 0
    assert all(figure.get("reason") for figure in measured["figures"].values() if figure.get("value") is None)
    assert left_out["state"] == "skipped"
    assert "GiB" in left_out["reason"]
    assert "llama" in ended.stdout


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is an accelerator here")
def test_without_an_accelerator_it_says_so(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "No accelerator was found here" in ended.stdout
