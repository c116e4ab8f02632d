"""Runs through a real Slurm of four nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from accelmark.audit.verify import verify_run
from accelmark.run.launchers.slurm.options import Options
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.launcher import options_of, parse_cluster
from tests.cluster.conftest import done, drive, ends, refused, running, signalled, statuses, stepping
from tests.cluster.slurm import slurm
from tests.cluster.test_containers import accelmark, write_tiny
from tests.run.fakes import left_running, make_plan, problems, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def slurm_conf() -> Iterator[str]:
    with slurm() as file:
        yield file


@pytest.fixture(autouse=True)
def in_slurm(slurm_conf: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    yield
    wait_for(lambda: not queue(), "an empty queue")


def queue() -> str:
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.strip()


def cluster(num_nodes: int, **more: object) -> ClusterSpec:
    hosts = [{"address": f"n{number}"} for number in range(1, num_nodes + 1)]
    values = {"name": "slurm", "launcher": "slurm", "hosts": hosts, "python": sys.executable}
    return ClusterSpec.model_validate(values | more)


def run_tiny(
    plugins: Path, run: Path, num_nodes: int, *options: str, **request: object
) -> subprocess.CompletedProcess[str]:
    write_tiny(plugins)
    values = cluster(num_nodes).model_dump(mode="json", exclude_unset=True)
    request |= {"vendor": "acme", "cluster": values, "cases": [{"key": f"tiny:pytorch:X1:{num_nodes}:1"}]}
    file = run.with_name("file.yaml")
    file.write_text(yaml.safe_dump(request))
    return accelmark("run", str(file), "--out", str(run), "--json", *options)


def test_two_nodes_train_a_case_to_its_target_in_an_allocation_of_their_own(plugins: Path, run: Path) -> None:
    ended = run_tiny(plugins, run, 2)
    (status,) = statuses(run)
    assert status.state == "succeeded", f"{ended.stdout}{ended.stderr}{status}"
    assert '"converged":true' in (run / "tiny-pytorch-X1x2x1" / "round1" / "result.json").read_text()
    found = verify_run(run)
    assert (found.changed, found.differences) == ((), ())


def test_a_submitted_run_ends_in_its_own_job(plugins: Path, run: Path, tmp_path: Path) -> None:
    submitted = run_tiny(plugins, run, 1, "--submit", timeout_s=300)
    assert submitted.returncode == 0, submitted
    job = json.loads(submitted.stdout)["job"]
    assert queue().split()[0] == job
    wait_for(lambda: not queue(), "the job's end")
    log = (tmp_path / "run.sbatch.log").read_text()
    (status,) = statuses(run)
    assert status.state == "succeeded", f"{log}{status}"
    script = (tmp_path / "run.sbatch").read_text()
    assert "#SBATCH --time=17\n" in script
    assert "#SBATCH --nodelist=n1\n" in script
    assert not (run / "slurm.job").exists(), "the run used its own job's allocation"


def test_a_cluster_file_without_hosts_means_the_nodes_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="list hosts, or run this inside an allocation"):
        parse_cluster({"launcher": "slurm"}, "cluster.yaml")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2],n4")
    found = parse_cluster({"launcher": "slurm"}, "cluster.yaml")
    assert [host.address for host in found.hosts] == ["n1", "n2", "n4"]
    options_of(Options, found).require_allocated(["n4", "n1"])
    with pytest.raises(RequestError, match=r"n3: not in the current allocation of Slurm, which has n\[1-2\],n4"):
        options_of(Options, found).require_allocated(["n1", "n3"])


def test_one_srun_starts_all_agents_and_a_killed_one_is_noticed_at_once(plugins: Path, run: Path) -> None:
    hosts = tuple(f"n{number}" for number in range(1, 5))
    process = running(run, make_plan(("steps=100000", "pace=0.1"), hosts=hosts, cluster=cluster(4)))
    steps = subprocess.run(["squeue", "--steps", "-ho", "%i %N"], capture_output=True, text=True, check=True).stdout
    placed = [line.split()[1] for line in steps.splitlines() if line.split()[0].rpartition(".")[2].isdigit()]
    (third,) = run.glob("*/round1/n3_noderank2")
    wait_for(lambda: (third / "agent.pid").exists(), "the agent's number")
    os.kill(json.loads((third / "agent.pid").read_text())["pid"], signal.SIGKILL)
    (status,) = ends(process, run, 1, "lost")
    assert placed == ["n[1-4]"], steps
    assert (status.reason or "").startswith("n3: node agent exited without writing exit.json"), status
    assert left_running(run) == []


def test_preflight_and_run_use_the_same_allocation(plugins: Path, run: Path) -> None:
    plan = make_plan((), hosts=("n1", "n2"), cluster=cluster(2))
    with socket.create_server(("", plan.cluster.master_port)):
        code, _, err = done(drive("start", run, "--look", plan=plan))
        assert (code, run.exists()) == (1, False)
    # All nodes are this machine: the port of n1 is in use.
    assert err.strip().startswith("error: n1: port 29501 is in use")
    wait_for(lambda: not queue(), "the allocation given back")
    ends(drive("start", run, "--look", plan=plan), run, 0, "succeeded")


def test_nodes_that_slurm_does_not_know_are_named_before_anything_is_submitted(plugins: Path, tmp_path: Path) -> None:
    hosts = [{"address": name} for name in ("n1", "n7", "x")]
    values = cluster(1).model_dump(mode="json", exclude_unset=True) | {"hosts": hosts}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    request = {"vendor": "acme", "cluster": "cluster.yaml", "cases": [{"key": "toy:pytorch:X1:3:1"}]}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
    run = ("run", str(tmp_path / "file.yaml"), "--synthetic", "--out", str(tmp_path / "run"))
    for arguments in (("preflight", str(tmp_path / "cluster.yaml")), run, (*run, "--submit")):
        ended = accelmark(*arguments)
        what = "Slurm has no node n7, x; its nodes (sinfo): n[1-4]; correct hosts in the cluster file"
        assert ended.returncode == 2, ended
        assert ended.stderr.endswith(f"error: {what}\n"), ended
        assert not queue()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("run")) == []


def test_a_run_directory_that_nodes_cannot_see_is_reported(plugins: Path, run: Path) -> None:
    """The marker file is removed, since all nodes here see this machine's files."""
    plan = make_plan((), hosts=("n1",), cluster=cluster(1))
    run.mkdir()
    hint = "choose a run directory on a file system that all nodes share (--out)"
    assert list(map(str, problems(plan, run))) == [f"n1: cannot see {run} of this machine ({hint})"]


def test_a_file_system_with_local_locks_is_reported(plugins: Path, run: Path, tmp_path: Path) -> None:
    """The nodes' Python succeeds in locking what another machine has locked, as on Lustre with ``localflock``."""
    source, library, python = tmp_path / "flock.c", tmp_path / "flock.so", tmp_path / "python"
    source.write_text("int flock(int descriptor, int operation) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    python.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    where = cluster(1).model_copy(update={"python": str(python)})
    says = f"n1: does not see that {run} is locked on this machine: locks of that file system are local"
    refused(drive("start", run, "--look", plan=make_plan((), hosts=("n1",), cluster=where)), says, 1)


def test_inside_an_allocation_a_killed_coordinator_is_resumed(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["salloc", "--no-shell", "--nodes=2", "--job-name=outer"], check=True, capture_output=True)
    job_id = subprocess.run(["squeue", "-ho", "%i"], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    try:
        run = tmp_path / "run"
        hosts = ("n1", "n2")
        process = drive("start", run, plan=make_plan(("steps=100", "pace=0.05"), (), hosts=hosts, cluster=cluster(2)))
        wait_for(lambda: stepping(run), "a step")
        signalled(process, signal.SIGKILL)
        ends(drive("resume", run), run, 0, "succeeded", "succeeded")
        assert queue().startswith(job_id)
    finally:
        subprocess.run(["scancel", job_id], check=True)
