"""Containers started by steps of a real Slurm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import drive, ends
from tests.cluster.test_apptainer import container, directory, sif, sqsh
from tests.cluster.test_containers import in_container
from tests.cluster.test_here import asked, podman_here
from tests.cluster.test_images import recipe
from tests.cluster.test_slurm import cluster, in_slurm, slurm_conf
from tests.run.fakes import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(250)]
__all__ = ["directory", "in_slurm", "recipe", "sif", "slurm_conf", "sqsh"]


@pytest.fixture(autouse=True)
def podman(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A podman that the nodes reach, since they are this machine."""
    with podman_here() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


def test_two_nodes_run_a_job_in_containers_and_a_dead_rank_ends_it(recipe: Path, run: Path) -> None:
    shutil.copytree(recipe, recipe.with_name("bare"))  # jobs of several hosts use the framework "bare"
    where = cluster(2, container=in_container("podman"))
    plan = make_plan((), ("steps=100000", "1:die"), hosts=("n1", "n2"), cluster=where)
    _, second = ends(drive("start", run, plan=plan), run, 1, "succeeded", "failed")
    assert (second.reason or "").startswith("n2: rank 1: killed by SIGKILL")
    assert asked("podman", "ps", "--all", "--quiet") == ""


@pytest.mark.parametrize("kind", ["sif", pytest.param("sqsh", marks=pytest.mark.heavy)])
def test_two_nodes_run_a_job_in_an_image_file_and_a_dead_rank_ends_it(
    kind: str, plugins: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    image, run = request.getfixturevalue(kind), tmp_path / "run"
    where = cluster(2, container=container(image))
    plan = make_plan((), ("steps=100000", "1:die"), hosts=("n1", "n2"), cluster=where)
    _, second = ends(drive("start", run, plan=plan), run, 1, "succeeded", "failed")
    assert (second.reason or "").startswith("n2: rank 1: killed by SIGKILL")
