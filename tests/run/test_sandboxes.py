"""Containers of Apptainer, Enroot and Pyxis: the commands that start jobs in them, and what cluster files ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from accelmark.plan.plan import Plan
from accelmark.run.agent.task import NodeJob
from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.spec.cluster import ClusterSpec, ContainerSpec
from tests.run.fakes import make_plan


def opened(plan: Plan, run: Path) -> tuple[Launcher, list[NodeJob]]:
    launcher = create_launcher(plan, run)
    return launcher, asyncio.run(node_jobs(plan.jobs[0], launcher))


def test_pyxis_makes_the_container_of_the_one_srun_of_a_job(plugins: Path, tmp_path: Path) -> None:
    vendor = plugins / "vendors" / "acme" / "vendor.yaml"
    vendor.write_text(
        vendor.read_text() + "container: {options: ['--device', '/dev/acme0'], mounts: [/opt/acme:/acme:ro]}\n"
    )
    image, options, hosts = "registry.example.com#team/box:1", ["--container-remap-root"], ("n1", "n2")
    container = {"engine": "pyxis", "image": image, "options": options, "mounts": ["/data:/data"]}
    values = {"launcher": "slurm", "hosts": [{"address": host} for host in hosts]}
    cluster = ClusterSpec.model_validate(values | {"container": container | {"python": "/opt/python"}})
    launcher, nodes = opened(make_plan((), hosts=hosts, cluster=cluster), tmp_path)
    ((*srun, shell, script),) = launcher.common_commands(nodes)
    code = str(launcher.code)
    assert srun[:4] == ["srun", "--jobid=JOBID", "--nodes=2", "--ntasks=2"]
    assert f"--container-image={image}" in srun
    (mounts,) = (word.partition("=")[2].split(",") for word in srun if word.startswith("--container-mounts="))
    assert {"/opt/acme:/acme:ro", "/data:/data", f"{tmp_path}:{tmp_path}", f"{code}:{code}:ro"} <= set(mounts)
    assert srun[-3:] == ["--no-container-mount-home", "--container-writable", "--container-remap-root"]
    assert "--device" not in srun, "an option of Docker"
    assert (shell, script) == ("sh", str(nodes[0].node_dir / "step.sh"))
    agent = launcher.agents(nodes)[1].commands()[0]
    assert agent[0] == "env"
    assert agent[agent.index("sh") :][1:3] == [f"{code}/accelmark/run/sandboxes/enter.sh", "/opt/python"]
    assert not any(word.startswith("srun") for word in agent), "the step runs it"
    clean_up = launcher.agents(nodes)[0].clean_up
    assert clean_up[-2:] == ["accelmark.run.processes", str(nodes[0].node_dir)]
    assert "enter.sh" not in " ".join(clean_up), "the host's Python ends processes of a dead agent"


def test_apptainer_runs_the_image_file_with_the_vendors_options_for_it(plugins: Path, tmp_path: Path) -> None:
    vendor = plugins / "vendors" / "acme" / "vendor.yaml"
    vendor.write_text(
        vendor.read_text()
        + "container: {options: ['--gpus', all], apptainer_options: ['--nv'], environment: {A: '1,2'}}\n"
    )
    container = {"engine": "apptainer", "image_file": "/images/box.sif", "options": ["--userns"]}
    plan = make_plan((), cluster=ClusterSpec.model_validate({"container": container}))
    launcher, (node,) = opened(plan, tmp_path)
    looks, agent = launcher.agents([node])[0].commands()[:2]
    assert looks == ["test", "-e", "/images/box.sif"]
    assert agent[:6] == ["apptainer", "exec", "--cleanenv", "--no-home", "--nv", "--userns"]
    bound = [agent[index + 1] for index, word in enumerate(agent) if word == "--bind"]
    assert f"{tmp_path}:{tmp_path}" in bound
    inside = agent[agent.index("/images/box.sif") + 1 :]
    assert inside[0] == "env"
    assert "A=1,2" in inside, "Apptainer's --env would split it"
    assert inside[inside.index("sh") :][1:3] == [f"{launcher.code}/accelmark/run/sandboxes/enter.sh", "python3"]


def test_enroot_starts_the_image_file_with_mounts_and_variables_of_its_own_form(plugins: Path, tmp_path: Path) -> None:
    vendor = plugins / "vendors" / "acme" / "vendor.yaml"
    vendor.write_text(vendor.read_text() + "container: {options: ['--gpus', all], environment: {A: '1,2'}}\n")
    container = {"engine": "enroot", "image_file": "/images/box.sqsh", "options": ["--uts"], "mounts": ["/data:/d:ro"]}
    plan = make_plan((), cluster=ClusterSpec.model_validate({"container": container}))
    launcher, (node,) = opened(plan, tmp_path)
    looks, agent = launcher.agents([node])[0].commands()[:2]
    assert looks == ["test", "-e", "/images/box.sqsh"]
    script = f"{launcher.code}/accelmark/run/sandboxes/enter.sh"
    assert agent[:6] == ["enroot", "start", "--rw", "--rc", script, "--uts"]
    mounted = [agent[index + 1] for index, word in enumerate(agent) if word == "--mount"]
    assert {"/data:/d:none:x-create=auto,rbind,ro", f"{tmp_path}:{tmp_path}:none:x-create=auto,rbind"} <= set(mounted)
    assert {"A=1,2", "container=enroot"} <= {agent[n + 1] for n, word in enumerate(agent) if word == "--env"}
    assert agent[agent.index("/images/box.sqsh") + 1] == "python3"


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ({"engine": "apptainer"}, "engine apptainer builds no image"),
        ({"engine": "apptainer", "image": "box:1", "image_file": "x.sif"}, "engine apptainer has no image: remove it"),
        ({"engine": "enroot", "image": "box:1"}, "engine enroot has no image: remove it"),
        ({"engine": "pyxis", "image": "box:1", "shm_size": "1g", "privileged": True}, "has no shm_size, privileged"),
        ({"engine": "pyxis", "image": "box:1", "image_file": "x.sqsh"}, "name either image or image_file"),
        ({"engine": "pyxis"}, "engine pyxis builds no image"),
    ],
)
def test_settings_that_an_engine_has_not_are_refused(container: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ContainerSpec.model_validate(container)
