"""An external trainer on two ranks, by one YAML file: figures, telemetry, audit and page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from accelmark.run.sandboxes.sandbox import recipe_of
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.job import ExternalJob, TrainJob
from accelmark.spec.log.perflog import PerfLogReader
from accelmark.spec.plugins.programs import TrainerSpec
from tests.external.conftest import COMMAND, HERE, Accelmark, result_of
from tests.run.fakes import make_plan, wait_for

KEY = "signs:slowgrad:CPU:1:2"


def test_the_guide_has_the_file_that_is_run_here() -> None:
    guide = (HERE.parents[1] / "docs" / "how-to" / "add-a-trainer.md").read_text(encoding="utf-8")
    written = guide.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(written) == yaml.safe_load((HERE / "slowgrad.yaml").read_text(encoding="utf-8"))


def test_two_ranks_train_by_one_yaml_file(accelmark: Accelmark, tmp_path: Path) -> None:
    ran = accelmark("train", KEY, "--out", "run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = result_of(tmp_path / "run")
    figures = {name: figure["value"] for name, figure in result["figures"].items()}
    assert result["state"] == "succeeded"
    assert result["converged"] is True
    assert (result["num_steps"], result["num_samples"], result["num_devices"]) == (120, 120 * 32, 2)
    assert figures["throughput_whole"] > 0
    assert figures["step_p50_ms"] >= 10
    assert 0 < figures["final_loss"] < 0.5
    assert figures["final_metric"] > 0.9
    assert len(result["telemetry"]) > 0
    assert result["figures"]["mfu"]["reason"] == "the log of trainer slowgrad does not give the FLOPs of its model"
    assert result["figures"]["data_wait_share"]["value"] is None
    verdict = json.loads((tmp_path / "run" / "summary.json").read_text())["cases"][0]
    assert verdict["verdict"] == "OPEN"
    assert any("weights were not evaluated again" in why for why in verdict["reasons"])
    assert "slowgrad" in (tmp_path / "run" / "report.html").read_text()
    (log,) = (tmp_path / "run").glob("*/round1/*/rank0.out.log")
    assert [record.event for record in PerfLogReader(log)].count("FINISHED") == 1, "the trainer writes one, too"
    assert "[PerfLog of the trainer] " in log.read_text()
    verified = accelmark("verify", "run")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_losses_of_every_tenth_step_are_enough(accelmark: Accelmark, tmp_path: Path) -> None:
    ran = accelmark("train", "signs:slowgrad", "--set", "model.every=10", "--set", "end.max_steps=60", "--out", "run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = result_of(tmp_path / "run")
    assert result["num_steps"] == 60
    assert result["figures"]["final_loss"]["value"] is not None
    assert result["figures"]["step_p50_ms"]["value"] is None
    points = [point["step"] for point in result["curves"]["loss"] if point["value"] is not None]
    assert points == list(range(10, 61, 10))


def test_a_trainer_that_fails_ends_the_job_with_the_reason(accelmark: Accelmark, tmp_path: Path) -> None:
    ran = accelmark("train", KEY, "--set", "model.fault=crashes", "--set", "end.max_steps=20", "--out", "run")
    assert ran.returncode == 1
    result = result_of(tmp_path / "run")
    assert result["state"] == "failed"
    assert "exited with code 3: RuntimeError: the optimizer exploded" in result["reason"]


@pytest.mark.heavy
def test_a_trainer_that_ignores_the_signal_is_killed_and_the_job_cancelled(plugins: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "ACCELMARK_PLUGINS": str(plugins), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [str(COMMAND), "train", "signs:slowgrad", "--set", "model.fault=hangs", "--out", "run"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    logs = partial((tmp_path / "run").glob, "*/round1/*/rank0.out.log")
    wait_for(lambda: any("data server" in log.read_text() for log in logs()), "the trainer")
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    (log,) = logs()
    (finished,) = [record for record in PerfLogReader(log) if record.event == "FINISHED"]
    assert finished.value["state"] == "cancelled"


@pytest.mark.parametrize(
    ("of_cluster", "of_trainer", "expected"),
    [(None, "slowgrad:1", "slowgrad:1"), ("site:2", "slowgrad:1", "site:2"), (None, None, "accelmark-cpu-pytorch")],
)
def test_the_image_is_the_clusters_else_the_trainers_else_that_of_its_framework(
    of_cluster: str | None, of_trainer: str | None, expected: str
) -> None:
    container = {"engine": "podman"} | ({"image": of_cluster} if of_cluster else {})
    plan = make_plan((), cluster=ClusterSpec.model_validate({"container": container}), vendor="cpu")
    job = plan.jobs[0].job
    assert isinstance(job.work, TrainJob)
    described = yaml.safe_load((HERE / "slowgrad.yaml").read_text())
    trainer = TrainerSpec.model_validate(described | {"image": of_trainer})
    work = ExternalJob(**job.work.model_dump(exclude={"kind", "is_checked", "killed"}), trainer=trainer)
    key = job.key.model_copy(update={"framework": "slowgrad"})
    recipe = recipe_of(plan, job.model_copy(update={"work": work, "key": key}))
    assert recipe is not None
    assert recipe.name.startswith(expected)
