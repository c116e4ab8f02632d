"""Containers on this machine, started by the local launcher, inspected through the engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.sandboxes.sandbox import ModuleCommand, job_sandbox
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed, podman_environment
from tests.cluster.boxed import dockerd, mounts
from tests.cluster.conftest import done, drive, signalled, statuses, stepping
from tests.cluster.test_containers import in_container
from tests.cluster.test_images import recipe
from tests.run.fakes import make_plan, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
__all__ = ["recipe"]
ENGINES = ("podman", "docker")


@contextlib.contextmanager
def podman_here() -> Iterator[dict[str, str]]:
    """Give the variables of a podman whose images are in a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="accelmark-podman-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        try:
            yield podman_environment(home)
        finally:
            subprocess.run(["umount", "--lazy", str(home / "podman" / "overlay")], capture_output=True, check=False)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A container engine that this machine's commands reach."""
    with contextlib.ExitStack() as stack:
        if request.param == "docker":
            if shutil.which("dockerd") is None:
                pytest.skip("dockerd is not installed")
            monkeypatch.setenv("DOCKER_HOST", stack.enter_context(dockerd(bed, 1)))
        else:
            for name, value in stack.enter_context(podman_here()).items():
                monkeypatch.setenv(name, value)
        yield request.param


def fakes_here(engine: str, *modes: str, clear_caches: bool = False, **container: object) -> Plan:
    values = {"container": in_container(engine) | container, "clear_caches": clear_caches}
    spec = ClusterSpec.model_validate(values)
    return make_plan(modes, cluster=spec)


def asked(engine: str, *arguments: str) -> str:
    done = subprocess.run([engine, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def cached_bytes(file: Path) -> int:
    shown = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", str(file)], capture_output=True)
    return int(shown.stdout)


def test_a_local_container_gets_the_settings_of_cluster_file_and_vendor_only(
    engine: str, recipe: Path, run: Path, tmp_path: Path
) -> None:
    vendor = recipe.parents[1] / "vendor.yaml"
    vendor.write_text(vendor.read_text() + "container: {options: ['--device', '/dev/null:/dev/acme0']}\n")
    extra = tmp_path / "with space; $HOME"
    extra.mkdir()
    (extra / "file").write_bytes(os.urandom(2**22))
    wishes: dict[str, Any] = {
        "shm_size": "96m", "options": ["--label", "asked=yes"],
        "mounts": [*mounts(), f"{extra}:/extra:ro"],
    }  # fmt: skip
    (extra / "file").read_bytes()
    assert cached_bytes(extra / "file") > 0
    process = drive("start", run, plan=fakes_here(engine, "steps=100000", clear_caches=True, **wishes))
    wait_for(lambda: stepping(run) or process.poll() is not None, "a step", 90)
    assert stepping(run), f"{done(process)}{statuses(run)}"
    assert cached_bytes(extra / "file") == 0, "dropped on the host, from inside"
    (found,) = json.loads(asked(engine, "inspect", asked(engine, "ps", "--quiet")))
    host = found["HostConfig"]
    assert host["Privileged"] is False
    assert host["ShmSize"] == 96 * 2**20
    assert [device["PathInContainer"] for device in host["Devices"]] == ["/dev/acme0"]
    assert found["Config"]["Labels"]["asked"] == "yes"
    mounted = {mount["Destination"]: (mount["Source"], mount["RW"]) for mount in found["Mounts"]}
    assert mounted["/extra"] == (str(extra), False)
    assert mounted[str(run)] == (str(run), True)
    assert {place for place, (_, writable) in mounted.items() if writable} == {str(run), "/run/accelmark-drop-caches"}
    assert signalled(process)[0] == 130
    assert [status.state for status in statuses(run)] == ["cancelled"]
    assert asked(engine, "ps", "--all", "--quiet") == ""
    ended = json.loads(next(run.rglob("exit.json")).read_text())
    assert ended["warnings"] == []


def test_a_container_is_privileged_only_where_the_cluster_file_asks_for_it(recipe: Path) -> None:
    """Checks the command only, since a machine that is a container itself may not start one."""
    job = make_plan(()).jobs[0].job
    inside = ModuleCommand("accelmark.run.agent", (), "box", {})
    for privileged in (False, True):
        plan = fakes_here("podman", privileged=privileged)
        sandbox = job_sandbox(plan, job, PurePosixPath("/code"), recipe.parents[1])
        assert ("--privileged" in sandbox.command("python3", inside)) is privileged


def test_caches_are_dropped_natively_too(plugins: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2**22))
    assert cached_bytes(file) > 0
    assert done(drive("start", tmp_path / "run", plan=make_plan((), cluster=ClusterSpec(clear_caches=True))))[0] == 0
    assert cached_bytes(file) == 0
