"""Launchers are plug-ins; the script of one `srun`, with a real shell."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from accelmark.run.agent.task import CODE_FILE
from accelmark.run.controller.coordinator import stop
from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.shared_filesystem import CommandAgent
from accelmark.run.launchers.slurm.launcher import ALLOCATION_FILE, script_of
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RunError, SpecError
from accelmark.spec.plugins.launcher import launcher_problems, parse_cluster, unusable_parts
from tests.cli.test_main import accelmark
from tests.run.fakes import make_plan
from tests.run.test_session import drive, ends

DECLARATION = """\
name: nice
is_localhost: true
run_files: [nice.level]
"""
OPTIONS = """\
from accelmark.spec.plugins.launcher import LauncherOptions

class Options(LauncherOptions):
    niceness: int = 10
"""
LAUNCHER = """\
from accelmark.run.launchers.shared_filesystem import SharedFilesystemLauncher
from accelmark.spec.plugins.launcher import options_model, options_of

class NiceLauncher(SharedFilesystemLauncher):
    def prefix(self, host):
        niceness = options_of(options_model("nice"), self.plan.cluster).niceness
        return ("nice", "-n", str(niceness))

    async def allocate(self):
        (self.run / "nice.level").write_text("held")

    async def close(self):
        (self.run / "nice.level").unlink(missing_ok=True)

create = NiceLauncher
"""


@pytest.fixture
def nice(plugins: Path) -> Path:
    folder = plugins / "launchers" / "nice"
    folder.mkdir(parents=True)
    (folder / "launcher.yaml").write_text(DECLARATION)
    (folder / "options.py").write_text(OPTIONS)
    (folder / "launcher.py").write_text(LAUNCHER)
    return folder


def test_a_launcher_from_a_plug_in_carries_a_run_to_its_end(nice: Path, run: Path) -> None:
    cluster = ClusterSpec.model_validate({"launcher": "nice", "niceness": 7, "python": sys.executable})
    plan = make_plan(("niceness",), (), cluster=cluster)
    ends(drive("start", run, "--look", plan=plan), run, 0, "succeeded", "succeeded")
    assert "niceness 7" in next(run.glob("*/round1/*/rank0.out.log")).read_text()
    assert "nice.level" not in (run / "MANIFEST.sha256").read_text()


def test_a_dry_run_shows_the_commands_of_a_launcher_from_a_plug_in(nice: Path, tmp_path: Path) -> None:
    request = {"vendor": "acme", "cluster": {"launcher": "nice"}, "cases": [{"key": "toy:pytorch:X1:1:1"}]}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
    arguments = ("--out", str(tmp_path / "run"), "--commands", "--set", "loader.synthetic=true")
    ended = accelmark("run", str(tmp_path / "file.yaml"), *arguments)
    assert "localhost: nice -n 10 env ACCELMARK_RUN=" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"launcher": "nise"}, ["x.yaml: launcher: unknown launcher 'nise' (did you mean 'nice'?)"]),
        ({"launcher": "nice", "nicenes": 1}, ["x.yaml: nicenes: unknown key (did you mean 'niceness'?)"]),
        ({"launcher": "nice", "ssh_port": 22}, []),
        ({"launcher": "ssh", "ssh_port": "no", "niceness": "of another launcher"}, ["x.yaml: ssh_port: must be"]),
        (
            {"launcher": "ssh", "vendor": "nvdia", "nicenes": 1},
            [
                "x.yaml: nicenes: unknown key (did you mean 'niceness'?)",
                "x.yaml: vendor: unknown vendor 'nvdia' (did you mean 'nvidia'?)",
            ],
        ),
        ({"launcher": 3}, ["x.yaml: launcher: unknown launcher 3"]),
    ],
)
def test_settings_of_launchers_are_checked(nice: Path, values: dict[str, object], problems: list[str]) -> None:
    found = [str(problem) for problem in launcher_problems(values, "x.yaml")]
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True)), found


def test_problems_of_a_cluster_file_and_of_its_launchers_settings_are_reported_together(nice: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster({"launcher": "nice", "niceness": "very", "hosts": []}, "x.yaml")
    assert [problem.key for problem in caught.value.problems] == ["hosts", "niceness"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hosts": [{"address": "localhost"}, {"address": "127.0.0.1"}]}, "starts everything on this machine"),
        (
            {"launcher": "ssh", "hosts": [{"address": "a"}, {"address": "a", "port": 22, "label": "b"}]},
            "hosts: duplicate host a:22",
        ),
    ],
)
def test_hosts_that_a_launcher_cannot_use_are_reported(values: dict[str, object], problem: str) -> None:
    (found,) = unusable_parts(ClusterSpec.model_validate(values))
    assert problem in str(found)


HOSTS = ("n1", "n2")


def agents(run: Path, command: list[str]) -> list[CommandAgent]:
    values = {"launcher": "slurm", "hosts": [{"address": host} for host in HOSTS]}
    plan = make_plan((), hosts=HOSTS, cluster=ClusterSpec.model_validate(values))
    launcher = create_launcher(plan, run)
    found = []
    for agent in launcher.agents(asyncio.run(node_jobs(plan.jobs[0], launcher))):
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
    monkeypatch.setattr("accelmark.run.launchers.slurm.launcher._CANCEL_PAUSES_S", (0.0, 0.0))
    directory = RunDirectory.create(run, make_plan(cluster=ClusterSpec(launcher="slurm")))
    (run / ALLOCATION_FILE).write_text("7")
    launcher = create_launcher(directory.plan, run)
    with nullcontext() if has_ended else pytest.raises(RunError, match="Slurm job 7"):
        asyncio.run(launcher.close())
    assert (run / ALLOCATION_FILE).exists() != has_ended
    scancel.write_text("#!/bin/sh\nexit 0\n")
    assert stop(run, at_once=False) != has_ended, "it ends what is left"
    assert not (run / ALLOCATION_FILE).exists()
