"""Whole runs on this machine, each coordinator in its own process: ends, interrupts, kills and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.audit.verify import verify_run
from accelmark.cli.results import report
from accelmark.plan.plan import Plan
from accelmark.report.view import RunIndex
from accelmark.results.sources import load_source, open_sources
from accelmark.results.store.bundle import check_manifest, write_bundle
from accelmark.run.agent.task import STOP_FILES
from accelmark.run.controller.coordinator import stop
from accelmark.run.display.summary import read_status
from accelmark.run.processes import ProcessId
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RunError
from tests.run.fakes import left_running, make_plan, wait_for

DRIVE = Path(__file__).with_name("drive.py")
ENDLESS = "steps=100000"

pytestmark = pytest.mark.usefixtures("plugins")


def drive(verb: str, run: Path, *options: str, plan: Plan | None = None) -> subprocess.Popen[str]:
    arguments = [sys.executable, str(DRIVE), verb, str(run)]
    if plan is not None:
        file = run.with_suffix(".plan")
        file.write_text(plan.model_dump_json())
        arguments.append(str(file))
    return subprocess.Popen([*arguments, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(run: Path, plan: Plan, *options: str) -> subprocess.Popen[str]:
    process = drive("start", run, *options, plan=plan)
    wait_for(lambda: stepping(run), "a step")
    return process


def done(process: subprocess.Popen[str], timeout_s: float = 400) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def signalled(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    process.send_signal(number)
    return done(process)


def states(run: Path) -> list[str]:
    return [status.state for status in statuses(run)]


def statuses(run: Path) -> list[JobStatus]:
    return list(RunDirectory.open(run).statuses().values()) if (run / "plan.json").exists() else []


def ends(
    process: subprocess.Popen[str], run: Path, code: int, *states: str, by: signal.Signals | None = None, says: str = ""
) -> list[JobStatus]:
    """End a coordinator ``by`` a signal, or wait for its end; check its exit code, output and states of jobs."""
    found, out, err = done(process) if by is None else signalled(process, by)
    ended = statuses(run)
    assert (found, [status.state for status in ended]) == (code, [*states]), f"{out}{err}{ended}"
    assert says in out + err
    return ended


def refused(process: subprocess.Popen[str], says: str, code: int = 2) -> None:
    """Check the exit code of a coordinator, and what it prints as an error."""
    found, out, err = done(process)
    assert (found, says in err) == (code, True), out + err


def stepping(run: Path) -> bool:
    logs = run.glob("*/round*/*/rank0.out.log")
    return any("STEP_END" in log.read_text(errors="replace").rpartition("\n")[0] for log in logs)  # a whole line


def agent_of(run: Path) -> ProcessId:
    identity = ProcessId.stored(next(run.glob("*/round*/*/agent.pid")))
    assert identity is not None
    return identity


def test_a_run_of_two_rounds_succeeds_leaves_all_its_files_and_is_reported_in_json_lines(run: Path) -> None:
    code, out, err = done(drive("start", run, "--json", plan=make_plan(("steps=80",), repeat=2)))
    assert (code, states(run)) == (0, ["succeeded", "succeeded"]), out + err
    node = run / "toy0-pytorch-X1x1x1" / "round2" / "localhost_noderank0"
    expected = {"agent.json", "exit.json", "sys_info.json", "rank0.out.log", "start_pytorch_task.log", "telemetry.json"}
    assert expected <= {path.name for path in node.iterdir()}
    assert {"plan.json", "events.jsonl", "summary.json"} <= {path.name for path in run.iterdir()}
    assert {"job.json", "result.json"} <= {path.name for path in node.parent.iterdir()}
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["state"] for line in lines if line["event"] == "state"] == ["preparing", "running", "succeeded"] * 2
    assert any(line["event"] == "progress" and line["step"] > 0 for line in lines)
    assert [line["event"] for line in lines if line["event"] == "result"] == ["result", "result"]


def test_other_cases_run_after_a_failure(run: Path) -> None:
    code, out, _ = done(drive("start", run, plan=make_plan(("die",), (), ("hang",), stall_timeout_s=3.0)))
    assert (code, states(run)) == (1, ["failed", "succeeded", "timed_out"])
    assert (statuses(run)[0].reason or "").startswith("rank 0: killed by SIGKILL (")
    assert "killed by SIGKILL" in out


def test_fail_fast_starts_nothing_after_a_failure(run: Path) -> None:
    ends(drive("start", run, plan=make_plan(("raise",), (), fail_fast=True)), run, 1, "failed", "cancelled")
    assert "fail_fast" in (statuses(run)[1].reason or "")
    summary = json.loads((run / "summary.json").read_text())
    assert [case["state"] for case in summary["cases"]] == ["failed", "cancelled"]
    assert any("fail_fast" in reason for reason in summary["cases"][1]["reasons"])


def test_ctrl_c_once_stops_cleanly_and_keeps_results(run: Path) -> None:
    process = running(run, make_plan((ENDLESS,), ()))
    ends(process, run, 130, "cancelled", "cancelled", by=signal.SIGINT)
    result = json.loads((run / "toy0-pytorch-X1x1x1" / "round1" / "result.json").read_text())
    assert (result["state"], result["marks"][0]) == ("cancelled", "partial")
    assert result["curves"]["loss"]
    assert left_running(run) == []


def test_ctrl_c_twice_kills_a_job_that_ignores_sigterm(run: Path) -> None:
    process = running(run, make_plan((ENDLESS, "deaf", "grandchild")))
    process.send_signal(signal.SIGINT)
    wait_for(lambda: list(run.glob(f"*/*/*/{STOP_FILES[False]}")), "the request to end")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    ends(process, run, 130, "cancelled", by=signal.SIGINT)
    assert list(run.glob(f"*/*/*/{STOP_FILES[True]}")), "the time for ending was not cut short"
    assert left_running(run) == []


def test_a_killed_coordinator_leaves_its_job_running_and_resume_attaches_to_it(run: Path) -> None:
    process = running(run, make_plan(("steps=100",), ()))
    signalled(process, signal.SIGKILL)
    assert agent_of(run).alive
    ends(drive("resume", run), run, 0, "succeeded", "succeeded")
    assert [status.attempt for status in statuses(run)] == [1, 1]


def test_a_killed_agent_makes_the_job_lost_and_resume_redoes_it_from_its_checkpoint(run: Path) -> None:
    process = running(run, make_plan(("checkpoint", "deaf", "first=hang"), ()))
    os.kill(agent_of(run).pid, signal.SIGKILL)
    ends(process, run, 1, "lost", "succeeded")
    assert "node agent exited without writing exit.json: killed by SIGKILL" in (statuses(run)[0].reason or "")
    assert left_running(run) == []

    ends(drive("resume", run), run, 0, "succeeded", "succeeded")
    assert [status.attempt for status in statuses(run)] == [2, 1]
    round_dir = run / "toy0-pytorch-X1x1x1" / "round1"
    assert json.loads((round_dir / "job.json").read_text())["resume"] is True
    assert (round_dir / "attempt1" / "localhost_noderank0" / "exit.json").exists()


@pytest.mark.heavy
def test_a_round_without_a_checkpoint_starts_again_and_says_so(run: Path) -> None:
    process = running(run, make_plan(("first=hang",)))
    assert (signalled(process)[0], states(run)) == (130, ["cancelled"])
    says = "round1: no checkpoint to resume from (checkpoint.every_steps writes some): it starts again at step 1"
    ends(drive("resume", run), run, 0, "succeeded", says=says)
    assert "no checkpoint to resume from" in (run / "events.jsonl").read_text()
    result = json.loads((run / "toy0-pytorch-X1x1x1" / "round1" / "result.json").read_text())
    assert "resumed" not in result["marks"]
    (found,) = (found for found in result["findings"] if found["rule"] == "resumed")
    assert (found["severity"], found["actual"][:42]) == ("info", "the round was started again at step 1: fig")


@pytest.mark.heavy
def test_failed_jobs_are_redone_only_when_asked(run: Path) -> None:
    ends(drive("start", run, plan=make_plan(("first=raise",))), run, 1, "failed")
    ends(drive("resume", run), run, 1, "failed")
    ends(drive("resume", run, "--failed", "--from-scratch"), run, 0, "succeeded")


def test_a_resume_that_preflight_refuses_leaves_a_run_that_verifies(run: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = ClusterSpec.model_validate({"hosts": [{"address": "localhost", "service_ports": [port]}]})
        done(drive("start", run, plan=make_plan(("raise",), cluster=cluster)))
        refused(drive("resume", run, "--failed", "--look"), f"port {port} is in use", 1)
    assert '"run_resumed"' in (run / "events.jsonl").read_text()
    assert check_manifest(run) == []


def test_a_run_that_never_started_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no Slurm
    cluster = ClusterSpec.model_validate({"name": "slurm", "launcher": "slurm", "hosts": [{"address": "localhost"}]})
    for _ in range(2):
        code, _, err = done(drive("start", tmp_path / "run", "--look", plan=make_plan((), cluster=cluster)))
        assert (code, err) == (1, "error: Slurm granted no allocation: sbatch is not on the PATH\n")
        assert not (tmp_path / "run").exists()


def test_a_running_run_shows_its_progress_and_keeps_its_directory_until_it_is_stopped(run: Path) -> None:
    process = running(run, make_plan((ENDLESS,), ()))
    seen = read_status(run)
    assert seen.coordinator is not None
    assert seen.coordinator.pid == process.pid
    assert [status.state for status in seen.statuses.values()] == ["running", "queued"]
    (progress,) = seen.progress.values()
    assert (progress.phase, progress.step >= 1) == ("training", True)
    refused(drive("start", run, plan=make_plan(())), "contains a run")
    refused(drive("resume", run), "in progress, locked by process")
    assert process.poll() is None
    assert stop(run, at_once=False)
    assert done(process)[0] == 130
    assert "a request to stop" in (statuses(run)[0].reason or "")
    assert read_status(run).coordinator is None
    assert not stop(run, at_once=False)


@pytest.mark.parametrize("at_once", [False, True])
def test_stop_ends_a_run_whose_coordinator_was_killed(run: Path, at_once: bool) -> None:
    process = running(run, make_plan((ENDLESS, "deaf") if at_once else (ENDLESS,), ()))
    signalled(process, signal.SIGKILL)
    assert stop(run, at_once=at_once)
    assert states(run) == ["cancelled", "cancelled"]
    assert left_running(run) == []


def test_a_resumed_run_is_in_progress_to_all_readers_and_not_edited(run: Path, tmp_path: Path) -> None:
    process = running(run, make_plan((ENDLESS,)))
    assert signalled(process)[0] == 130
    assert [(one.path, one.problems) for one in open_sources([run])[0]] == [(run, ())]
    process = drive("resume", run)
    wait_for(lambda: states(run) == ["running"] and stepping(run), "a step after the run was resumed")
    assert RunIndex(tmp_path).snapshot().unfinished == {"run": run}
    readers: list[Callable[[], object]] = [
        lambda: load_source(run),
        lambda: verify_run(run),
        lambda: report(run),
        lambda: report(run, recompute=True),
        lambda: write_bundle(run, tmp_path / "bundle"),
    ]
    for read in readers:
        with pytest.raises(
            RunError, match=r"was resumed and has not ended again: it is in progress; see 'accelmark status"
        ):
            read()
    signalled(process, signal.SIGKILL)
    assert "it is in progress, or was interrupted" in open_sources([run])[1][0]
    assert stop(run, at_once=True)
    assert open_sources([run])[1] == []
    assert verify_run(run).changed == ()
    assert RunIndex(tmp_path).snapshot().unfinished == {}


def test_a_run_whose_vendor_or_case_has_changed_is_not_resumed(run: Path, plugins: Path) -> None:
    done(drive("start", run, plan=make_plan(("raise",))))
    (plugins / "vendors" / "acme" / "notes.txt").write_text("changed")
    what = "vendors/acme: has changed since the run was planned (start a new run)"
    refused(drive("resume", run, "--failed"), what)


def test_a_copy_of_a_run_in_progress_neither_continues_nor_stops_it(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    process = running(run, make_plan((ENDLESS,)))
    shutil.copytree(run, copy)
    for verb in ("resume", "end"):
        refused(drive(verb, copy), f"is a copy of the run {run}")
    assert states(run) == ["running"]
    assert signalled(process)[0] == 130
    run.rename(tmp_path / "moved")
    assert not stop(tmp_path / "moved", at_once=False), "a moved run is no copy"


def test_a_closed_terminal_leaves_a_job_that_ends_without_a_coordinator_and_is_not_done_again(run: Path) -> None:
    process = running(run, make_plan(("steps=50",)))
    process.send_signal(signal.SIGHUP)
    refused(process, f"accelmark resume {run}", 130)
    wait_for(lambda: list(run.glob("*/*/*/exit.json")), "exit.json")
    (status,) = ends(drive("resume", run), run, 0, "succeeded")
    assert status.attempt == 1
