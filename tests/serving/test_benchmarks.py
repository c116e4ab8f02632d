"""MMLU through lm-evaluation-harness and a real server, on questions in the layout of the published data set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs

MAIN = "from accelmark.cli import main; main()"


def write_mmlu(directory: Path) -> int:
    """Write two questions and five examples for each subject of MMLU; return the number of subjects."""
    import lm_eval
    import pyarrow as pa
    import pyarrow.parquet as pq

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    folder = Path(lm_eval.__file__).parent / "tasks/mmlu/default"
    found = [yaml.load(file.read_text(), Loader) for file in sorted(folder.glob("mmlu_*.yaml"))]  # noqa: S506 - a SafeLoader
    subjects = sorted(entry["dataset_name"] for entry in found if "dataset_name" in entry)
    configurations = []
    for number, subject in enumerate(subjects):
        place = directory / subject
        place.mkdir(parents=True)
        files = []
        for split, count in (("test", 2), ("validation", 1), ("dev", 5)):
            rows: dict[str, list[Any]] = {
                "question": [f"What is {number} plus {each}?" for each in range(count)],
                "subject": [subject] * count,
                "choices": [[str(number + each + offset) for offset in range(4)] for each in range(count)],
                "answer": [0] * count,
            }
            pq.write_table(pa.table(rows), place / f"{split}-00000-of-00001.parquet")
            files.append({"split": split, "path": f"{subject}/{split}-*"})
        configurations.append({"config_name": subject, "data_files": files})
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configurations})}---\n")
    return len(subjects)


def serve(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "serve", "llama_mini", "--out", str(tmp_path / "run"), *arguments]
    return subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
        env=os.environ | {"COLUMNS": "300", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip


def test_a_benchmark_without_its_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = serve(tmp_path, "--set", "benchmarks=[mmlu]", "--dry-run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no data: mmlu/ is expected below the directory given with --data" in done.stdout + done.stderr


@pytest.mark.heavy
def test_mmlu_is_measured_by_the_harness_through_a_server(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="pip install -c constraints.txt 'accelmark[benchmarks]'")
    pytest.importorskip("llama_cpp", reason="builds from source: pip install -c constraints.txt 'accelmark[llama-cpp]'")
    data = tmp_path / "data"
    num_subjects = write_mmlu(data / "mmlu")
    (plays,) = dataset_specs(("shakespeare",), "here")
    (data / "shakespeare").symlink_to(ensure(plays))
    few = ["--concurrency", "1", "--duration", "2", "--set", "server_options.n_ctx=4096"]
    few += ["--set", "server_options.logits_all=true", "--set", "benchmarks=[mmlu]", "--set", "benchmark_limit=1"]
    done = serve(tmp_path, "--server", "llama_cpp", "--data", str(data), *few)
    result = [json.loads(file.read_text()) for file in (tmp_path / "run").rglob("result.json")]
    logs = "".join(file.read_text(errors="replace")[-3000:] for file in (tmp_path / "run").rglob("harness.log"))
    assert len(result) == 1, done.stdout + done.stderr + logs
    assert result[0]["state"] == "succeeded", done.stdout + done.stderr + logs
    (score,) = result[0]["serving"]["scores"]
    assert (score["task"], score["metric"], score["limit"], score["num_fewshot"]) == ("mmlu", "acc,none", 1, 5)
    assert score["num_questions"] == num_subjects == 57
    assert 0 <= score["value"] <= 1
    case = json.loads((tmp_path / "run/summary.json").read_text())["cases"][0]
    assert ("open", "benchmark-accuracy") in {(found["severity"], found["rule"]) for found in case["findings"]}
    assert "lm-evaluation-harness" in (tmp_path / "run/report.html").read_text()
