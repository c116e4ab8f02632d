"""Jobs in image files that Apptainer and Enroot run: on this machine, on hosts over SSH and on nodes of Slurm."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from accelmark.plan.plan import Plan
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.cluster.boxed import write_rootfs
from tests.cluster.conftest import done, drive, ends, statuses, stepping
from tests.cluster.test_containers import in_container, tiny, train_adapted
from tests.run.fakes import FAKE_RANK, left_running, make_plan, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
__all__ = ["tiny"]
MakeCluster = Callable[..., ClusterSpec]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image as a directory; skips where Apptainer does not run it."""
    if shutil.which("apptainer") is None:
        pytest.skip("Apptainer is not installed (tests/cluster/apptainer.sh)")
    return runs(extracted(tmp_path_factory), *APPTAINER)


def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = tmp_path_factory.mktemp("image") / "image"
    write_rootfs(image.with_suffix(".tar"))
    image.mkdir()
    with tarfile.open(image.with_suffix(".tar")) as archive:
        archive.extractall(image, filter="tar")
    return image


APPTAINER = ("apptainer", "exec", "--userns", "--bind", "/usr:/usr:ro")


def runs(image: Path, *command: str) -> Path:
    ran = subprocess.run([*command, str(image), "true"], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"{command[0]} does not run {image.name} here: {ran.stderr.strip()[-300:]}")
    return image


@pytest.fixture(scope="module")
def sif(directory: Path) -> Path:
    """The same image as a file; skips where Apptainer, which may have to mount it, does not run it."""
    file = directory.with_suffix(".sif")
    built = subprocess.run(
        ["apptainer", "build", str(file), str(directory)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return runs(file, *APPTAINER)


@pytest.fixture(scope="module")
def sqsh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same image as Enroot's; skips where Enroot does not run it."""
    if shutil.which("enroot") is None:
        pytest.skip("Enroot is not installed")
    root = extracted(tmp_path_factory)
    image = root.with_suffix(".sqsh")
    subprocess.run(["mksquashfs", str(root), str(image), "-quiet", "-no-progress"], capture_output=True, check=True)
    return runs(image, "enroot", "start", "--mount", "/usr:/usr:none:rbind,ro")


def container(image: Path) -> dict[str, object]:
    engine, options = ("enroot", []) if image.suffix == ".sqsh" else ("apptainer", ["--userns"])
    return in_container(engine) | {"options": options, "image_file": str(image)}


def fakes_here(image: Path, *cases: tuple[str, ...]) -> Plan:
    return make_plan(*cases, cluster=ClusterSpec.model_validate({"container": container(image)}))


def logs(run: Path) -> str:
    return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in run.rglob("agent.log"))


@pytest.mark.parametrize("kind", ["directory", "sif", "sqsh"])
def test_a_job_runs_in_an_image_and_ends_with_ctrl_c(
    kind: str, plugins: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_HOST", "not for the container")
    image, run = request.getfixturevalue(kind), tmp_path / "run"
    process = drive("start", run, plan=fakes_here(image, (), ("steps=100000",)))
    second_log = "toy1*/round1/*/rank0.out.log"
    wait_for(lambda: list(run.glob(second_log)) or process.poll() is not None, "the second job", 120)
    assert process.poll() is None, f"{done(process)}{statuses(run)}{logs(run)}"
    ranks = [pid for pid in left_running(run) if str(FAKE_RANK) in psutil.Process(pid).cmdline()]
    assert ranks
    assert all("OF_THE_HOST" not in psutil.Process(pid).environ() for pid in ranks)
    ends(process, run, 130, "succeeded", "cancelled", by=signal.SIGINT)
    assert left_running(run) == []
    information = json.loads(next(run.rglob("sys_info.json")).read_text())
    assert information["virtualisation"] == "container"


@pytest.mark.parametrize("kind", ["directory", "sqsh"])
def test_what_a_killed_agent_leaves_is_ended_from_another_container(
    kind: str, plugins: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    image, run = request.getfixturevalue(kind), tmp_path / "run"
    process = drive("start", run, plan=fakes_here(image, ("steps=100000", "grandchild")))
    wait_for(lambda: stepping(run) or process.poll() is not None, "a step", 120)
    assert process.poll() is None, f"{done(process)}{statuses(run)}{logs(run)}"
    agents = [pid for pid in left_running(run) if "accelmark.run.agent.agent" in psutil.Process(pid).cmdline()]
    for pid in agents:
        psutil.Process(pid).kill()
    (status,) = ends(process, run, 1, "lost")
    assert left_running(run) == [], [psutil.Process(p).cmdline() for p in left_running(run)]
    assert "processes that it left behind were killed" in (status.reason or ""), logs(run)


@pytest.mark.parametrize("kind", ["directory", pytest.param("sqsh", marks=pytest.mark.heavy)])
def test_a_case_is_trained_on_two_hosts_with_its_vendors_adaptation(
    kind: str, cluster: MakeCluster, bed: Bed, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    train_adapted(cluster, bed, tmp_path, 2, container(request.getfixturevalue(kind)))


def test_a_host_without_the_image_is_not_ready(directory: Path, plugins: Path, tmp_path: Path) -> None:
    code, _, err = done(drive("start", tmp_path / "run", "--look", plan=fakes_here(Path("/nowhere.sif"), ())))
    assert (code, (tmp_path / "run").exists()) == (1, False)
    assert "localhost: the file /nowhere.sif is missing (copy it there, or correct image_file" in err
