"""``--dry-run``: what is shown for each launcher is what would be run, and nothing is."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from tests.cli.test_main import accelmark
from tests.run.fakes import make_plan, wait_for
from tests.run.test_session import agent_of, done, drive, stepping

TWO = [{"address": "h1", "service_ports": [2222]}, {"address": "h2", "service_ports": [2222]}]


def dry_run(
    plugins: Path,
    tmp_path: Path,
    cluster: Mapping[str, object],
    key: str,
    *more: str,
    lacks: str | None = None,
    **environment: str,
) -> dict[str, Any]:
    """Return what a dry run shows, with no program on the PATH that it could start; ``lacks``: one that is missed."""
    request = {"vendor": "acme", "cluster": dict(cluster), "cases": [{"key": key}]}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
    run = tmp_path / "run"
    file, synthetic = str(tmp_path / "file.yaml"), ("--set", "loader.synthetic=true")
    arguments = ("run", file, "--out", str(run), "--dry-run", *synthetic, *more)
    ended = accelmark(*arguments, "--json", PATH=str(tmp_path / "nothing"), **environment)
    said = [] if lacks is None else [f"{lacks} is not on the PATH"]
    assert ended.returncode == (1 if said else 0), ended.stdout + ended.stderr
    assert not run.exists()
    shown: dict[str, Any] = json.loads(ended.stdout)
    problems = [problem.partition(" (")[0] for problem in shown["problems"]]
    assert len(problems) == len(said) and all(map(str.endswith, problems, said)), problems  # noqa: PT018
    plain = accelmark(*arguments, PATH=str(tmp_path / "nothing"), **environment)
    assert all("import " not in line for line in plain.stdout.splitlines()), "programs are shown by name"
    return shown


def briefly(commands: list[list[str]]) -> list[str]:
    """Return what each command is about: the program or module, inside whatever carries it there."""
    found = []
    for command in commands:
        words = " ".join(command)
        known = (
            "sbatch", "image inspect", "podman build", "podman run", "accelmark.run.agent",
            "accelmark.telemetry.record", "accelmark.frameworks.process_launcher", "accelmark.run.preflight.devices",
        )  # fmt: skip
        verbs = re.findall(r"main\(\*sys\.argv\[1:\]\)\)?\s+(?:'\s+)?(\w+)", words)
        names = [name for name in known if name in words] + verbs
        found.append(names[0] if names else words)
    return found


def test_a_local_dry_run_shows_preflight_agent_recorder_and_ranks(plugins: Path, tmp_path: Path) -> None:
    shown = dry_run(plugins, tmp_path, {}, "toy:pytorch:X1:1:2")
    (commands,) = shown["commands"].values()
    assert briefly(shown["preflight"]["localhost"]) == ["probe", "packages"]
    assert briefly(commands["localhost"]) == [
        "accelmark.run.agent", "accelmark.telemetry.record", "accelmark.frameworks.process_launcher",
    ]  # fmt: skip
    launch, rank = " ".join(commands["localhost"][-1]).split(" -- ")
    assert launch.endswith("--nproc 2 --nnodes 1 --node-rank 0 --free-port ACCELMARK_COORDINATOR")
    assert rank.split()[-2] == "accelmark.train.loop.rank"


@pytest.mark.parametrize(
    ("words", "setting", "missing"),
    [
        (("train", "resnet50"), "optimizer.lr ", "ImageNet-1k (ILSVRC 2012) cannot be fetched"),
        (("train", "llama_mini:pytorch:H100:1:8:3"), "optimizer.lr ", "names H100, but this machine has CPU"),
        (("infer", "sam_h", "--synthetic"), "batch_size ", "tensorrt computes on cuda, the vendor's device is cpu"),
        (("serve", "llama3_1_8b"), "load.concurrency ", "no weights: llama3_1_8b/"),
    ],
)
def test_a_dry_run_without_its_data_shows_the_settings_and_then_what_is_missing(
    words: tuple[str, ...], setting: str, missing: str, tmp_path: Path
) -> None:
    arguments = (*words, "--vendor", "cpu", "--commands", "--out", str(tmp_path / "run"))
    ended = accelmark(*arguments)
    assert f"\n  {setting}" in ended.stdout, ended.stdout + ended.stderr
    assert "this would not start" in ended.stderr
    assert missing in ended.stderr.partition("error: ")[2]
    as_json = accelmark(*arguments, "--json")
    (shown,) = map(json.loads, as_json.stdout.splitlines())
    assert any(missing in problem for problem in shown["problems"])
    assert (ended.returncode, as_json.returncode) == (2, 2)
    started = accelmark(*(word for word in arguments if word != "--commands"))
    assert (started.returncode, started.stdout, (tmp_path / "run").exists()) == (2, "", False)
    assert missing in started.stderr


def test_a_dry_run_over_ssh_shows_every_command_of_every_host(plugins: Path, tmp_path: Path) -> None:
    cluster: dict[str, object] = {"launcher": "ssh", "hosts": TWO, "user": "bench", "ssh_port": 2200, "key": "/k e/y"}
    shown = dry_run(plugins, tmp_path, cluster, "toy:pytorch:X1:2:1")
    assert briefly(shown["preflight"]["h1"]) == ["probe", "packages", "listen"]
    assert shown["preflight"]["h2"][2][-1].endswith(" reach h1 29501 TOKEN 4")
    (commands,) = shown["commands"].values()
    for noderank, host in enumerate(("h1", "h2")):
        lines = commands[host]
        assert briefly(lines) == [
            "wheel", "clear", "files", "accelmark.run.agent", "follow",
            "accelmark.telemetry.record", "accelmark.frameworks.process_launcher",
        ]  # fmt: skip
        for line in lines[:5]:
            assert line[:-1] == ["ssh", "-p", "2200", "-i", "/k e/y", f"bench@{host}"]
        ranks = lines[-1]
        assert f"--node-rank {noderank} -- " in " ".join(ranks)
        assert "ACCELMARK_COORDINATOR=h1:29501" in ranks
        (ports,) = [word.partition("=")[2] for word in ranks if word.startswith("FLAGPERF_HOSTS_PORTS=")]
        assert ports == "2222,2222"


def test_a_dry_run_in_a_container_shows_image_and_container(plugins: Path, tmp_path: Path) -> None:
    recipe = plugins / "vendors" / "acme" / "images" / "pytorch"
    recipe.mkdir(parents=True)
    (recipe / "Dockerfile").write_text("FROM scratch\n")
    container: dict[str, object] = {"engine": "podman", "shm_size": "1g", "python": "/opt/python"}
    shown = dry_run(plugins, tmp_path, {"container": container}, "toy:pytorch:X1:1:2", lacks="podman")
    (commands,) = shown["commands"].values()
    lines = commands["localhost"]
    assert briefly(lines)[:3] == ["image inspect", "podman build", "podman run"]
    assert "accelmark.run.agent.agent" in lines[2]
    assert lines[2][lines[2].index("--shm-size") + 1] == "1g"
    assert lines[-1][0] == "/opt/python"
    over_ssh = {"launcher": "ssh", "hosts": [{"address": "h1"}], "container": container}
    (commands,) = dry_run(plugins, tmp_path, over_ssh, "toy:pytorch:X1:1:2")["commands"].values()
    assert briefly(commands["h1"])[:5] == ["wheel", "image inspect", "podman build", "clear", "files"]
    assert " podman run --rm " in commands["h1"][5][-1]


@pytest.mark.parametrize("allocation", [None, "77"])
def test_a_dry_run_on_slurm_shows_the_request_where_there_is_no_allocation(
    plugins: Path, tmp_path: Path, allocation: str | None
) -> None:
    cluster: dict[str, object] = {"launcher": "slurm", "hosts": TWO, "slurm_options": ["--partition=gpu"]}
    told = {"SLURM_JOB_ID": allocation} if allocation else {}
    lacks = None if allocation else "sbatch"
    shown = dry_run(plugins, tmp_path, cluster, "toy:pytorch:X1:2:1", lacks=lacks, **told)
    held = ["--exclusive", "--mem=0", "--no-requeue", "--output=/dev/null", "--wrap=exec sleep infinity"]
    asked = ["sbatch", "--parsable", "--job-name=accelmark-file", "--nodes=2", "--nodelist=h1,h2", *held]
    asked.append("--partition=gpu")
    assert shown["first"] == ([] if allocation else [asked])
    (commands,) = shown["commands"].values()
    step = ["srun", f"--jobid={allocation or 'JOBID'}", "--nodes=1", "--ntasks=1", "--nodelist=h2"]
    assert shown["preflight"]["h2"][0][:5] == step
    (together,) = shown["common"]["toy-pytorch-X1x2x1/round1"]
    assert together[1:5] == [step[1], "--nodes=2", "--ntasks=2", "--nodelist=h1,h2"]
    assert together[-2:] == ["sh", f"{shown['directory']}/toy-pytorch-X1x2x1/round1/h1_noderank0/step.sh"]
    assert commands["h2"][0][0] == "env"
    assert briefly(commands["h2"]) == [
        "accelmark.run.agent",
        "accelmark.telemetry.record",
        "accelmark.frameworks.process_launcher",
    ]


def test_a_dry_run_of_a_submitted_run_shows_its_batch_script(plugins: Path, tmp_path: Path) -> None:
    cluster: dict[str, object] = {"launcher": "slurm", "hosts": TWO, "slurm_options": ["--partition=gpu"]}
    shown = dry_run(plugins, tmp_path, cluster, "toy:pytorch:X1:2:1", "--submit", lacks="sbatch")
    assert shown["first"] == [], "the run is inside the job's allocation"
    lines = shown["batch_script"].splitlines()
    assert {"#SBATCH --nodelist=h1,h2", "#SBATCH --partition=gpu"} <= set(lines)
    assert lines[-1].endswith(f"--out {shown['directory']} --set loader.synthetic=true --json")
    assert "--dry-run" not in lines[-1]
    assert "--submit" not in lines[-1]
    refused = accelmark("run", "quickstart", "--vendor", "cpu", "--submit", "--dry-run")
    assert (refused.returncode, "launcher local submits no batch jobs" in refused.stderr) == (2, True), refused


def test_the_executed_commands_are_those_of_the_dry_run(plugins: Path, tmp_path: Path) -> None:
    plan = make_plan(("steps=100000",))
    run = (tmp_path / "run").resolve()
    launcher = create_launcher(plan, run)
    (node,) = asyncio.run(node_jobs(plan.jobs[0], launcher))
    programs = (
        dropwhile(lambda word: word == "env" or "=" in word, command)  # env NAME=VALUE ... PROGRAM
        for command in launcher.agents([node])[0].commands()
    )
    shown = set(map(tuple, programs))
    process = drive("start", run, plan=plan)
    wait_for(lambda: stepping(run), "a step")
    agent = agent_of(run).pid
    pids = [agent, *(process.pid for process in psutil.Process(agent).children())]
    seen = {tuple(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]) for pid in pids}
    process.send_signal(signal.SIGINT)
    done(process)
    assert seen == shown


def test_a_dry_run_shows_no_secrets(plugins: Path, tmp_path: Path) -> None:
    images = plugins / "vendors" / "acme" / "images" / "pytorch"
    images.mkdir(parents=True)
    (images / "Dockerfile").write_text("FROM scratch\n")
    pip_source = "https://bob:hunter2@mirror/simple"
    container = {"engine": "podman", "pip_source": pip_source, "options": ["-e", "A_KEY=open5ame"]}
    cluster = {"launcher": "ssh", "hosts": TWO, "container": container, "environment": {"HF_TOKEN": "it's hidden"}}
    shown = json.dumps(dry_run(plugins, tmp_path, cluster, "toy:pytorch:X1:2:1"))
    for secret in ("hunter2", "open5ame", "hidden"):
        assert secret not in shown
    assert "https://(left out)@mirror/simple" in shown


def test_names_with_metacharacters_are_shell_quoted(plugins: Path, tmp_path: Path) -> None:
    evil = "a b;$(touch x) 'q'"
    request = {"vendor": "acme", "cluster": {"environment": {"EVIL": evil}}, "cases": [{"key": "toy:pytorch:X1:1:1"}]}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
    run = tmp_path / "run $(touch y)"
    arguments = ("--out", str(run), "--commands", "--set", "loader.synthetic=true")
    ended = accelmark("run", str(tmp_path / "file.yaml"), *arguments)
    (ranks,) = [line for line in ended.stdout.splitlines() if " accelmark.train.loop.rank " in line]
    words = shlex.split(ranks.partition(": ")[2])
    assert f"EVIL={evil}" in words
    assert words[-1].startswith(f"{run}/")
