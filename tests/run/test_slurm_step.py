"""The script that one ``srun`` runs on all hosts of a job. The shell is real, Slurm is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from accelmark.run.agent.task import CODE_FILE
from accelmark.run.controller.execution import node_jobs
from accelmark.run.controller.stop import stop
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.shared_filesystem import CommandAgent
from accelmark.run.launchers.slurm.launcher import ALLOCATION_FILE, script_of
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RunError
from tests.run.fakes import make_plan

HOSTS = ("n1", "n2")


def agents(run: Path, command: list[str]) -> list[CommandAgent]:
    values = {"launcher": "slurm", "hosts": [{"address": host} for host in HOSTS]}
    plan = make_plan((), hosts=HOSTS, cluster=ClusterSpec.model_validate(values))
    launcher = create_launcher(plan, run)
    found = []
    for agent in launcher.agents(asyncio.run(node_jobs(RunDirectory(run, plan), plan.jobs[0], launcher))):
        assert isinstance(agent, CommandAgent)
        agent.node.node_dir.mkdir(parents=True)
        agent.command = command
        found.append(agent)
    return found


def run_on(node: str, script: str) -> subprocess.CompletedProcess[str]:
    variables = {"SLURMD_NODENAME": node, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", script], env=variables, capture_output=True, text=True, check=False)


def test_each_node_runs_its_own_agent_in_its_directory(plugins: Path, tmp_path: Path) -> None:
    first, second = agents(tmp_path / "a run;", ["sh", "-c", 'echo "$PWD $1"; exit 3', "sh", "it's $HOME"])
    done = run_on("n2", script_of([first, second]))
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    where = second.node.node_dir
    assert (where / "agent.log").read_text() == f"{where} it's $HOME\n"
    assert (where / CODE_FILE).read_text() == "3\n"
    assert list(first.node.node_dir.iterdir()) == []


def test_a_node_without_an_agent_is_an_error(plugins: Path, tmp_path: Path) -> None:
    done = run_on("n3", script_of(agents(tmp_path / "run", ["true"])))
    assert (done.returncode, done.stderr) == (92, "accelmark: error: the job has no agent for node n3\n")


def test_the_agent_handles_a_signal_to_the_whole_step_before_the_script_ends(plugins: Path, tmp_path: Path) -> None:
    first, second = agents(
        tmp_path / "run", ["sh", "-c", "trap 'echo asked; exit 5' TERM; kill -TERM $PPID $$; sleep 9"]
    )
    assert run_on("n1", script_of([first, second])).returncode == 5
    assert (first.node.node_dir / "agent.log").read_text() == "asked\n"


@pytest.mark.parametrize(("num_failures", "has_ended"), [(2, True), (99, False)])
def test_an_allocation_is_kept_until_slurm_confirms_its_end(
    num_failures: int, has_ended: bool, plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scancel, run = tmp_path / "bin" / "scancel", tmp_path / "run"
    scancel.parent.mkdir()
    scancel.write_text(
        f"#!/bin/sh\necho $1 >>{tmp_path}/tries\n[ $(wc -l <{tmp_path}/tries) -gt {num_failures} ] || "
        "{ echo 'Unable to contact slurm controller' >&2; exit 1; }\n"
    )
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", str(scancel.parent), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("accelmark.run.launchers.slurm.job._CANCEL_PAUSES_S", (0.0, 0.0))
    directory = RunDirectory.create(run, make_plan(cluster=ClusterSpec(launcher="slurm")))
    (run / ALLOCATION_FILE).write_text("7")
    launcher = create_launcher(directory.plan, run)
    with nullcontext() if has_ended else pytest.raises(RunError, match="Slurm job 7"):
        asyncio.run(launcher.close())
    assert (run / ALLOCATION_FILE).exists() != has_ended
    scancel.write_text("#!/bin/sh\nexit 0\n")
    assert stop(run, at_once=False) != has_ended, "it ends what is left"
    assert not (run / ALLOCATION_FILE).exists()
