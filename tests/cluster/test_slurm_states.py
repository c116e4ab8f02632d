"""What Slurm does to a run: its queue, scancel, time limits, failed nodes; and that no allocation is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import done, drive, ends, record_fault, running, signalled, statuses
from tests.cluster.test_containers import accelmark
from tests.cluster.test_slurm import cluster, in_slurm, queue, slurm_conf
from tests.run.fakes import left_running, make_plan, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
__all__ = ["in_slurm", "slurm_conf"]
ENDLESS = ("steps=100000", "pace=0.1")


def numbers(state: str) -> list[str]:
    command = ["squeue", "--noheader", "--name=accelmark-test", f"--states={state}", "--format=%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@contextmanager
def occupied(node: str) -> Iterator[None]:
    """Hold a node of the cluster, so that other requests wait in the queue."""
    command = ["sbatch", "--parsable", f"--nodelist={node}", "--output=/dev/null", "--wrap", "exec sleep infinity"]
    job_id = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        wait_for(lambda: f" {job_id} " in f" {queue()} " and " R " in queue(), "the node's other job")
        yield
    finally:
        subprocess.run(["scancel", job_id], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_while_slurm_queues_it_leaves_no_request(
    number: signal.Signals, plugins: Path, run: Path
) -> None:
    with occupied("n1"):
        process = drive("start", run, "--look", plan=make_plan((), hosts=("n1",), cluster=cluster(1)))
        wait_for(lambda: numbers("PENDING"), "the request in the queue")
        wait_for(lambda: (run / "slurm.job").exists(), "its number on disk")
        code, out, err = signalled(process, number)
        if number == signal.SIGKILL:
            assert numbers("PENDING"), "nobody could cancel it"
            done(drive("end", run))
        else:
            assert code == 130, out + err
        assert numbers("PENDING,RUNNING") == []


def test_a_coordinator_that_exits_at_once_returns_its_allocation(plugins: Path, run: Path) -> None:
    process = running(run, make_plan((*ENDLESS, "deaf"), hosts=("n1",), cluster=cluster(1)))
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.communicate()[0] is not None
    assert process.returncode == 130
    wait_for(lambda: not queue(), "the allocation given back")


def test_scancel_ends_the_run_as_cancelled_and_requests_nothing_more(plugins: Path, run: Path) -> None:
    process = running(run, make_plan(ENDLESS, (), hosts=("n1", "n2"), cluster=cluster(2), retry_lost=1))
    (job_id,) = numbers("RUNNING")
    subprocess.run(["scancel", job_id], check=True)
    first, second = ends(process, run, 130, "cancelled", "cancelled")
    assert (first.reason, first.attempt) == (f"Slurm job {job_id} was cancelled (scancel)", 1)
    assert second.reason == f"not started: Slurm job {job_id} was cancelled (scancel)"
    assert left_running(run) == []


def test_a_failed_node_makes_the_job_lost_and_it_is_retried(plugins: Path, run: Path) -> None:
    plan = make_plan(("steps=20", "first=hang"), hosts=("n1", "n2"), cluster=cluster(2), retry_lost=1)
    process = running(run, plan)
    (job_id,) = numbers("RUNNING")
    down = ["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test"]
    subprocess.run(down, check=True)
    wait_for(lambda: statuses(run)[0].attempt == 2, "the second attempt")
    # The node returns by itself as soon as it registers again, or by this.
    subprocess.run(["scontrol", "update", "NodeName=n2", "State=RESUME"], check=False, capture_output=True)
    (status,) = ends(process, run, 0, "succeeded")
    assert status.attempt == 2
    events = (run / "events.jsonl").read_text()
    assert f"Slurm job {job_id} ended because a node failed" in events


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("scontrol", "requeue", "{job}"), "was requeued by a user or by Slurm (Slurm starts it again"),
        (("scancel", "{job}.0"), "*** STEP {job}.0 ON n1 CANCELLED AT "),
        (("pkill", "-KILL", "--oldest", "--full", "^srun.*{run}"), "srun: was killed by SIGKILL"),
    ],
)
def test_who_ended_a_job_or_a_step_of_slurm_is_named(
    command: tuple[str, ...], reason: str, plugins: Path, run: Path
) -> None:
    where = cluster(1).model_copy(update={"slurm_options": ["--requeue"]})
    process = running(run, make_plan(ENDLESS, hosts=("n1",), cluster=where))
    (job,) = numbers("RUNNING")
    subprocess.run([part.format(job=job, run=run) for part in command], check=True)
    (status,) = ends(process, run, 1, "lost")
    record_fault(f"Slurm: {' '.join(command)}", "lost, names who", status)
    assert reason.format(job=job) in (status.reason or ""), status
    assert left_running(run) == []


@pytest.mark.heavy
def test_an_allocation_is_kept_on_disk_while_slurms_controller_does_not_answer(plugins: Path, run: Path) -> None:
    process = running(run, make_plan(("steps=30", "pace=0.1"), hosts=("n1",), cluster=cluster(1)))
    (job,) = numbers("RUNNING")
    controller = int((Path(os.environ["SLURM_CONF"]).parent / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        code, out, err = done(process)
    finally:
        os.kill(controller, signal.SIGCONT)
    record_fault("Slurm: its controller stops before the run ends", "succeeded, exit code 1", statuses(run)[0])
    assert (code, f"Slurm job {job} could not be cancelled" in err) == (1, True), out + err
    assert (run / "slurm.job").read_text() == job
    assert done(drive("end", run))[0] == 0
    wait_for(lambda: not queue(), "the allocation given back")
    assert not (run / "slurm.job").exists()


def test_slurms_time_limit_makes_the_job_timed_out(plugins: Path, run: Path) -> None:
    limited = cluster(1).model_copy(update={"slurm_options": ["--time=1"]})
    process = drive("start", run, plan=make_plan(ENDLESS, hosts=("n1",), cluster=limited))
    (status,) = ends(process, run, 1, "timed_out")
    assert "reached its time limit of 00:01:00: raise --time" in (status.reason or "")


def test_a_submitted_run_in_the_queue_is_seen_and_stopped(plugins: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "file.yaml"

    def submit(**options: object) -> subprocess.CompletedProcess[str]:
        values = cluster(1).model_dump(mode="json", exclude_unset=True) | options
        request = {"vendor": "acme", "cluster": values, "cases": [{"key": "toy:pytorch:X1:1:1"}]}
        file.write_text(yaml.safe_dump(request))
        return accelmark("run", str(file), "--synthetic", "--out", str(run), "--submit")

    refused = submit(slurm_options=["--partition=gpuu"])
    assert "invalid partition specified: gpuu" in refused.stderr
    assert refused.stderr.endswith("(slurm_options in the cluster file: --partition=gpuu)\n"), refused
    assert "unrecognized option '--tiem=5' (slurm_options" in submit(slurm_options=["--tiem=5"]).stderr
    assert list(tmp_path.glob("run*")) == [], "a refused job leaves no script"
    run.mkdir()
    (run / "plan.json").touch()
    assert "contains a run" in submit().stderr
    shutil.rmtree(run)
    with occupied("n1"):
        submitted = submit()
        assert submitted.returncode == 0, submitted
        (job_id,) = subprocess.run(
            ["squeue", "-ho", "%i", "--states=PENDING"], capture_output=True, text=True, check=True
        ).stdout.split()
        seen = accelmark("status", str(run))
        assert (seen.returncode, f"queued as Slurm job {job_id}" in " ".join(seen.stdout.split())) == (0, True), seen
        assert f"job {job_id} was cancelled" in " ".join(accelmark("stop", str(run)).stdout.split())
    seen = accelmark("status", str(run))
    assert " ".join(seen.stdout.split()) == f"{run}: did not start: Slurm job {job_id} was cancelled (scancel)"
    assert not run.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_preflight_prints_what_it_waits_for_and_cancels_its_request(number: signal.Signals, tmp_path: Path) -> None:
    file, shown = tmp_path / "cluster.yaml", tmp_path / "shown"
    file.write_text(yaml.safe_dump(cluster(1).model_dump(mode="json", exclude_unset=True)))
    # SIGINT is ignored in a background process of a script.
    command = ["env", "--ignore-signal=INT", sys.executable, "-m", "accelmark", "preflight", str(file)]
    with occupied("n1"), shown.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
        wait_for(lambda: "waiting for Slurm job" in shown.read_text(), "the reason")
        process.send_signal(number)
        assert process.wait(60) == 130
        assert len(queue().splitlines()) == 1, "the node's other job"
