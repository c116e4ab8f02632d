"""MLLOG lines are judged by MLCommons' own checker (package mlperf-logging), on real and on generated runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.results.export import KNOWN_BENCHMARKS, RULESET, write_mllog
from accelmark.results.store.bundle import check_manifest, write_manifest
from accelmark.run.record.measure import measure_run
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import run_rank
from tests.made_run import Made, make_round, make_run
from tests.train.jobs import make_job, node_dir_of


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose one round the driver really trained: the tests' tiny case, two epochs and a half."""
    directory = tmp_path_factory.mktemp("trained")
    settings = {"end.max_steps": 80, "evaluate.every_epochs": 1, "optimizer.lr": 0.001}
    job = make_job(directory, settings)
    round_dir = directory / "run" / "tiny" / "round1"
    node = node_dir_of(round_dir)
    (round_dir / "job.json").write_text(job.model_dump_json())
    descriptor = os.open(node / "rank0.out.log", os.O_WRONLY | os.O_CREAT)
    try:
        assert run_rank(job, PerfLogWriter(0, descriptor), time.monotonic(), StopRequest(wanted=False)) == 0
    finally:
        os.close(descriptor)
    (directory / "run" / "plan.json").write_text("{}")
    write_manifest(directory / "run")
    return directory / "run"


def test_the_figures_of_a_real_run_flow_into_its_lines(trained: Path) -> None:
    (path,) = write_mllog(trained)
    values = {line["key"]: line["value"] for line in lines_of(path)}
    assert (values["train_samples"], values["eval_samples"]) == (512, 101)
    assert values["global_batch_size"] == 16
    blocks = [line["metadata"] for line in lines_of(path) if line["key"] == "block_start"]
    assert [(one["first_epoch_num"], one["epoch_count"], one["samples_count"]) for one in blocks] == [
        (1, 1, 512), (2, 1, 512), (3, 0.5, 256),
    ]  # fmt: skip
    accuracies = [line["metadata"]["epoch_num"] for line in lines_of(path) if line["key"] == "eval_accuracy"]
    assert accuracies == [1, 2, 2.5]
    times = [line["time_ms"] for line in lines_of(path)]
    assert times == sorted(times)


def test_the_checker_passes_on_a_real_run_that_names_the_benchmark_to_be_checked_as(
    trained: Path, tmp_path: Path
) -> None:
    (path,) = write_mllog(trained, benchmark="resnet")
    done = check(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_under_the_cases_own_name_the_checker_has_no_rules_for_it(trained: Path, tmp_path: Path) -> None:
    (path,) = write_mllog(trained)
    done = check(path, tmp_path)
    assert done.returncode != 0
    assert "open_tiny.yaml" in done.stderr + (tmp_path / "checker.log").read_text()
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("model", ["resnet50", "bert"])
def test_the_compliance_checker_passes_on_a_finished_run(tmp_path: Path, model: str) -> None:
    run = make_run(tmp_path / "run", Made(model=model))
    measure_run(run)
    shown = CliRunner().invoke(app, ["report", str(run), "--mllog"], catch_exceptions=False).output.split()
    path = Path(shown[0])
    assert shown == [str(path), str(run / "report.html")]
    assert check_manifest(run) == []
    done = check(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_checker_refuses_what_is_broken(tmp_path: Path) -> None:
    (path,) = write_mllog(make_run(tmp_path / "run", Made(model="bert")))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"run_stop"' not in line))
    assert check(path, tmp_path).returncode != 0


def test_the_known_benchmarks_are_those_of_the_checker() -> None:
    package = importlib.util.find_spec("mlperf_logging.compliance_checker")
    assert package is not None
    assert package.origin is not None
    rules = Path(package.origin).parent / f"training_{RULESET}"
    names = {path.stem.removeprefix("open_") for path in rules.glob("open_*.yaml")} - {"common"}
    assert set(KNOWN_BENCHMARKS) == names


def test_a_benchmark_that_mlperf_has_not_is_refused_with_the_nearest(trained: Path) -> None:
    with pytest.raises(RequestError, match=r"no benchmark 'resnet50' \(did you mean 'resnet'\?\)"):
        write_mllog(trained, benchmark="resnet50")


def test_one_name_for_several_cases_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(model="resnet50"))
    make_round(run / "bert-pytorch-X1x1x1" / "round1", Made(model="bert"))
    with pytest.raises(RequestError, match="has bert and resnet50"):
        write_mllog(run, benchmark="resnet")
    assert not list(run.rglob("mllog.log"))
    assert len(write_mllog(run)) == 2


def test_a_run_that_did_not_finish_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for log in run.rglob("rank0.out.log"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(RunError, match="nothing to export as MLLOG"):
        write_mllog(run)


def test_a_cancelled_round_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    log = next((run / "toy-pytorch-X1x1x1" / "round2").rglob("rank0.out.log"))
    log.write_text(log.read_text().replace('"completed"', '"cancelled"'))
    assert [path.parent.name for path in write_mllog(run)] == ["round1"]


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_resumed_round_begins_with_its_first_attempt(tmp_path: Path, is_continued: bool) -> None:
    run = make_run(tmp_path / "run", Made())
    log = next(run.rglob("rank0.out.log"))
    first = log.read_text()
    earlier = log.parents[1] / "attempt1" / log.parent.name / log.name
    earlier.parent.mkdir(parents=True)
    earlier.write_text(first.replace('"completed"', '"cancelled"'))
    later = [json.loads(line.partition("] ")[2]) for line in first.splitlines()]
    for record in later:
        record["metadata"]["time_ms"] += 60_000
        if record["event"] == "TRAIN_START":
            record["value"] = {"resumed": is_continued}
    log.write_text("".join(f"[PerfLog] {json.dumps(record)}\n" for record in later))
    lines = {line["key"]: line["time_ms"] for line in lines_of(write_mllog(run)[0])}
    start, end = (
        next(each["metadata"]["time_ms"] for each in later if each["event"] == name)
        for name in ("TRAIN_START", "TRAIN_END")
    )
    assert lines["run_start"] == int(start) - (60_000 if is_continued else 0)
    stops = [line for line in lines_of(write_mllog(run)[0]) if line["key"] == "run_stop"]
    assert [line["time_ms"] for line in stops] == [int(end)]


def check(path: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", RULESET]
    command += ["--log_output", str(directory / "checker.log"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
