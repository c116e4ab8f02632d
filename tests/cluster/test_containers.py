"""Cases that are trained on hosts over SSH: a built-in one on two hosts, a tiny one in containers of each engine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.catalog import load_case
from tests.cluster.bed import WORK, Bed
from tests.cluster.boxed import ADAPTED, dockerd, mounts, podman, served, write_adaptation, write_index, write_rootfs
from tests.cluster.conftest import drive, record_fault, signalled, statuses, stepping
from tests.run.fakes import make_plan, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]
MakeCluster = Callable[..., ClusterSpec]

TINY = Path(__file__).parents[1] / "train" / "tiny" / "pytorch.py"
CASE = """
name: tiny
version: 1
title: Tiny
description: Made up for tests, but really trained.
licence: Apache-2.0
size: mini
train:
  unit: sample
  target: {metric: accuracy, direction: at_least, value: 0.9, why: made up for tests}
  mutable: [precision, loader]
  settings:
    batch_size: 32
    eval_batch_size: 64
    end: {max_epochs: 6}
    evaluate: {every_epochs: 1}
    optimizer: {name: sgd, lr: 0.1}
    model: {features: 16, width: 32, dropout: 0.0, samples: 1024, eval_samples: 256, sleep_ms: 0, fault_at: 0,
            fault_rank: 0, fault: none}
"""


def write_tiny(plugins: Path, text: str = CASE) -> None:
    case = plugins / "cases" / "tiny"
    case.mkdir()
    (case / "case.yaml").write_text(text)
    shutil.copy(TINY, case / "pytorch.py")


@pytest.fixture
def tiny(plugins: Path) -> Path:
    """The tiny case, and an image recipe of the vendor acme."""
    write_tiny(plugins)
    recipe = plugins / "vendors" / "acme" / "images" / "pytorch"
    recipe.mkdir(parents=True)
    write_rootfs(recipe / "rootfs.tar")
    (recipe / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    write_adaptation(plugins)
    return plugins


def run_file(directory: Path, cluster: ClusterSpec, key: str, vendor: str = "acme") -> Path:
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster.model_dump(mode="json", exclude_unset=True)))
    file = directory / "file.yaml"
    file.write_text(yaml.safe_dump({"vendor": vendor, "cluster": "cluster.yaml", "cases": [{"key": key}]}))
    return file


def accelmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    body = "from accelmark.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", body, *arguments], capture_output=True, text=True, timeout=1200, check=False
    )


def in_container(engine: str) -> dict[str, object]:
    return {"engine": engine, "mounts": mounts(), "python": sys.executable}


@pytest.mark.heavy
@pytest.mark.timeout(1500)  # a minute and a half on two idle cores
def test_two_hosts_train_a_built_in_case_to_its_target(cluster: MakeCluster, run: Path, tmp_path: Path) -> None:
    for spec in dataset_specs(load_case("resnet_mini").data, "resnet_mini"):
        ensure(spec, allow_subset=True)  # the bed's hosts have no way out, but see this machine's cache
    file = run_file(tmp_path, cluster(2), "resnet_mini:pytorch:CPU:2:1", vendor="cpu")
    shown = accelmark("run", str(file), "--out", str(run), "--commands")
    assert shown.returncode == 0, shown.stderr
    assert "n1: ssh -p 22 -i " in shown.stdout
    assert "--node-rank 1" in shown.stdout
    assert not run.exists()
    # The two hosts share this machine's cores: each rank may not take them all.
    ended = accelmark("run", str(file), "--set", "threads=1", "--out", str(run), "--json")
    result = json.loads((run / "resnet_mini-pytorch-CPUx2x1" / "round1" / "result.json").read_text())
    assert statuses(run)[0].state == "succeeded", ended.stdout + ended.stderr + str(statuses(run))
    assert result["converged"] is True
    logs = sorted(run.glob("*/round1/*/rank*.out.log"))
    assert [log.parent.name for log in logs] == ["n1_noderank0", "n2_noderank1"]


def train_adapted(
    cluster: MakeCluster, bed: Bed, directory: Path, num_hosts: int, container: dict[str, object]
) -> None:
    """Train the tiny case in containers with the vendor's packages, kernel and variables, from what was delivered."""
    run = directory / "run"
    with served(write_index(directory / "index"), f"{bed.net}.254") as index:
        spec = cluster(num_hosts, container=container | {"pip_source": index})
        file = run_file(directory, spec, f"tiny:pytorch:X1:{num_hosts}:1:1")
        ended = accelmark("run", str(file), "--out", str(run), "--json")
    agent_log = "".join(log.read_text()[-3000:] for log in run.rglob("agent.log"))
    assert statuses(run)[0].state == "succeeded", f"{ended.stdout}{ended.stderr}{statuses(run)}{agent_log}"
    (result,) = run.glob("*/round1/result.json")
    assert json.loads(result.read_text())["converged"] is True
    for rank, node in enumerate(sorted(run.glob("*/round1/*_noderank*"))):
        assert ADAPTED in (node / f"rank{rank}.out.log").read_text()
        record = json.loads((node / "adaptation.json").read_text())
        assert record["installed"] == ["acme-kernel==1.0", "acme-notes==1.0"], "pydantic is there already"
        assert record["environment"] == {"ACME_MODE": "fast mode"}
        task = json.loads((node / "agent.json").read_text())
        job = json.loads((bed.work(rank + 1) / Path(task["job_file"]).relative_to(WORK)).read_text())
        assert job["adaptation"]["path"].startswith(f"{WORK}/code/"), "as it was delivered, not as it is here"


def test_a_case_is_trained_in_podman_containers_with_its_vendors_adaptation(
    cluster: MakeCluster, bed: Bed, tiny: Path, tmp_path: Path
) -> None:
    train_adapted(cluster, bed, tmp_path, 2, in_container("podman"))
    assert podman(bed, "images", "--format", "{{.Repository}}:{{.Tag}}").count("accelmark-acme-pytorch:") == 1
    assert podman(bed, "ps", "--all", "--quiet") == ""


def test_a_container_that_is_removed_is_lost_and_stop_leaves_none(
    cluster: MakeCluster, bed: Bed, tiny: Path, run: Path
) -> None:
    images = tiny / "vendors" / "acme" / "images"
    shutil.copytree(images / "pytorch", images / "bare")
    spec = cluster(2, container=in_container("podman"))
    plan = make_plan(("steps=100000",), ("steps=100000",), hosts=("n1", "n2"), cluster=spec)
    process = drive("start", run, plan=plan)
    wait_for(lambda: stepping(run), "a step", 100)
    name = podman(bed, "ps", "--format", "{{.Names}}", number=2)
    removed = time.monotonic()
    podman(bed, "rm", "--force", "--time", "0", name, number=2)
    wait_for(lambda: statuses(run)[0].ended, "the end of the first job", 60)
    noticed_s = time.monotonic() - removed
    wait_for(lambda: list(run.glob("toy1*/round1/*/rank0.out.log")), "the second job", 60)
    signalled(process, signal.SIGTERM)
    first, second = statuses(run)
    record_fault("podman: the container of a host is removed", "lost, names n2", first, noticed_s)
    assert (first.state, second.state) == ("lost", "cancelled"), (first, second)
    assert "n2" in (first.reason or "")
    assert "container" in (first.reason or "")
    assert [podman(bed, "ps", "--all", "--quiet", number=number) for number in (1, 2)] == ["", ""]


def test_a_case_is_trained_under_docker(cluster: MakeCluster, bed: Bed, tiny: Path, tmp_path: Path) -> None:
    if shutil.which("dockerd") is None:
        pytest.skip("dockerd is not installed")
    with dockerd(bed, 1):
        train_adapted(cluster, bed, tmp_path, 1, in_container("docker"))
