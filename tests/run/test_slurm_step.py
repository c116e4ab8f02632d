"""The script that one ``srun`` runs on all hosts of a job. The shell is real, Slurm is not."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from accelmark.run.controller.node_jobs import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.shared_filesystem import CommandAgent
from accelmark.run.launchers.slurm.step import ENDED_FILE, script_of
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
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
    assert (where / ENDED_FILE).read_text() == "3\n"
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
