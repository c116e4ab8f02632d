"""Images on real hosts: built from a vendor's recipe or loaded from a file, and failures of both."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.catalog import folders
from tests.cluster.bed import Bed
from tests.cluster.boxed import podman, write_rootfs
from tests.cluster.conftest import done, drive, record_fault, statuses
from tests.cluster.test_containers import in_container
from tests.run.fakes import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
MakeCluster = Callable[..., ClusterSpec]


@pytest.fixture
def recipe(plugins: Path) -> Path:
    folder = plugins / "vendors" / "acme" / "images" / "pytorch"
    folder.mkdir(parents=True)
    write_rootfs(folder / "rootfs.tar")
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    return folder


def fakes_in(cluster: MakeCluster, version: str | None = None, **container: object) -> Plan:
    plan = make_plan((), hosts=("n1",), cluster=cluster(1, container=in_container("podman") | container))
    (job,) = plan.jobs
    key = job.job.key.model_copy(update={"framework_version": version})
    return plan.model_copy(update={"jobs": (job.model_copy(update={"job": job.job.model_copy(update={"key": key})}),)})


def images(bed: Bed) -> set[str]:
    return set(podman(bed, "images", "--filter", "dangling=false", "--format", "{{.Repository}}:{{.Tag}}").splitlines())


def test_an_image_is_built_only_when_absent_or_changed(
    cluster: MakeCluster, bed: Bed, recipe: Path, tmp_path: Path
) -> None:
    before = images(bed)
    (recipe / "mark").write_text("images")
    text = "FROM scratch\nARG PIP_SOURCE\nLABEL source=$PIP_SOURCE\nADD rootfs.tar /\nCOPY mark /mark\n"
    (recipe / "Dockerfile").write_text(text)
    for number in (1, 2):
        plan = fakes_in(cluster, pip_source="https://mirror.example/simple")
        assert done(drive("start", tmp_path / f"run{number}", plan=plan))[0] == 0
        assert len(images(bed) - before) == 1
    (built,) = images(bed) - before
    assert podman(bed, "image", "inspect", "--format", "{{.Labels.source}}", built) == "https://mirror.example/simple"
    assert len(list(tmp_path.glob("run1/*/round1/*/image.log"))) == 1
    assert not list(tmp_path.glob("run2/*/round1/*/image.log")), "was there already"
    (recipe / "mark").write_text("changed")
    assert done(drive("start", tmp_path / "run3", plan=fakes_in(cluster)))[0] == 0
    assert len(images(bed) - before) == 2
    versioned = recipe.with_name("pytorch_2.1")
    shutil.copytree(recipe, versioned)
    assert done(drive("start", tmp_path / "run4", plan=fakes_in(cluster, "2.1")))[0] == 0
    assert [name for name in images(bed) if "accelmark-acme-pytorch_2.1:" in name]
    (versioned / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nCOPY nothing /\n")
    assert done(drive("start", tmp_path / "run5", plan=fakes_in(cluster, "2.1")))[0] == 1
    reason = statuses(tmp_path / "run5")[0].reason or ""
    assert reason.startswith("n1: the image accelmark-acme-pytorch_2.1:")
    assert "could not be built: " in reason
    assert "nothing" in reason


def test_an_image_is_loaded_from_a_file(cluster: MakeCluster, bed: Bed, recipe: Path, tmp_path: Path) -> None:
    archive = tmp_path / "boxed.tar"
    podman(bed, "build", "--tag", "boxed:1", str(recipe))
    podman(bed, "save", "--output", str(archive), "boxed:1")
    podman(bed, "rmi", "--force", "boxed:1")
    plan = fakes_in(cluster, image="boxed:1", image_file=str(archive))
    assert done(drive("start", tmp_path / "run", plan=plan))[0] == 0, statuses(tmp_path / "run")
    assert "localhost/boxed:1" in images(bed)

    def reason(name: str, **container: str) -> str:
        done(drive("start", tmp_path / name, plan=fakes_in(cluster, **container)))
        (status,) = statuses(tmp_path / name)
        assert status.state == "failed"
        return status.reason or ""

    other = reason("other", image="other:2", image_file=str(archive))
    expected = f"n1: {archive} contains localhost/boxed:1, not other:2 (container.image)"
    assert other == expected
    corrupt = tmp_path / "corrupt.tar"
    corrupt.write_bytes(archive.read_bytes()[:200_000])
    told = reason("corrupt", image="other:2", image_file=str(corrupt))
    assert told.startswith(f"n1: the image other:2 could not be loaded from {corrupt}: ")
    gone = reason("gone", image="other:2", image_file="/nowhere/boxed.tar")
    assert "/nowhere/boxed.tar: no such file or directory" in gone
    unmade = reason("unmade", image="other:2")
    assert unmade.startswith("n1: the image other:2 could not be pulled: Error: "), unmade


def test_an_image_installs_packages_from_the_index_of_the_cluster_file() -> None:
    found = [file for folder in folders("vendors").values() for file in folder.path.glob("images/*/Dockerfile")]
    assert found
    for dockerfile in found:
        texts = [path.read_text() for path in dockerfile.parent.iterdir() if path.is_file()]
        if any("pip install" in text for text in texts):
            assert "ARG PIP_SOURCE" in dockerfile.read_text()
            assert any("${PIP_SOURCE" in text for text in texts)


def test_a_full_storage_of_podman_is_named(cluster: MakeCluster, bed: Bed, recipe: Path, tmp_path: Path) -> None:
    archive, run = tmp_path / "large.tar", tmp_path / "run"
    (recipe / "ballast").write_bytes(os.urandom(8 << 20))
    (recipe / "Dockerfile").write_text("FROM scratch\nCOPY ballast /\n")
    podman(bed, "build", "--tag", "large:1", str(recipe))
    podman(bed, "save", "--output", str(archive), "large:1")
    storage = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(bed.home(1) / "podman")]
    subprocess.run(bed.inside(1, *storage), check=True)
    try:
        done(drive("start", run, plan=fakes_in(cluster, image="large:1", image_file=str(archive))))
    finally:
        subprocess.run(bed.inside(1, "umount", "-l", storage[-1]), check=True)
        podman(bed, "rmi", "--force", "large:1")
    (status,) = statuses(run)
    record_fault("podman's storage is full", "failed, names the disk", status)
    reason = (status.reason or "").lower()
    assert (status.state, "no space left on device" in reason, "the disk is full" in reason) == ("failed", True, True)
