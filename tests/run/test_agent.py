"""The node agent with real processes: each kind of end, and that no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from accelmark.results.store.bundle import unpack, write_bundle
from accelmark.results.store.loaded_run import SUMMARY_FILE
from accelmark.results.store.secret_list import SECRETS_FILE
from accelmark.run.agent.task import AgentTask, TelemetryTask, VisibleDevices
from accelmark.run.processes import NODE_MARKER, RUN_MARKER, descendants
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.catalog import find
from tests.run.fakes import left_running, wait_for

MakeTask = Callable[..., AgentTask]
Agent = subprocess.Popen[bytes]


def node_dir(task: AgentTask) -> Path:
    return task.job_file.parent / "here_noderank0"


def start(task: AgentTask, **variables: str) -> Agent:
    where = node_dir(task)
    (where / "agent.json").write_text(task.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "accelmark.run.agent.agent", str(where)],
        env=os.environ | {RUN_MARKER: task.run, NODE_MARKER: str(where)} | variables,
        start_new_session=True,
    )


def ended(task: AgentTask, agent: Agent) -> NodeExit:
    agent.wait(60)
    return NodeExit.model_validate_json((node_dir(task) / "exit.json").read_bytes())


def said(task: AgentTask, text: str) -> bool:
    log = node_dir(task) / "rank0.out.log"
    return log.exists() and text in log.read_text(errors="replace")


def test_a_rank_that_finishes_makes_the_node_succeed(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    task = make_task()
    end = ended(task, start(task))
    assert (end.state, end.reason, end.warnings) == ("succeeded", None, ())
    assert [(rank.rank, rank.state, rank.exit_code) for rank in end.ranks] == [(0, "succeeded", 0)]
    information = json.loads((node_dir(task) / "sys_info.json").read_text())
    assert information["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert information["environment"]["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert "TORCHINDUCTOR_CACHE_DIR" not in information["environment"], "it names a place of this round only"
    assert not list(node_dir(task).glob(".*"))


def test_cpu_time_of_other_processes_is_counted(make_task: MakeTask) -> None:
    task = make_task("steps=10", "pace=0.1")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            end = ended(task, start(task))
        finally:
            other.kill()
    assert end.others_cpu_s is not None
    assert end.others_cpu_s > 0.2, "a process beside it was busy all the time"


def test_compiled_code_is_in_the_round_directory_and_removed_with_the_round(make_task: MakeTask) -> None:
    task = make_task("compile")
    assert ended(task, start(task)).state == "succeeded"
    assert said(task, f"compiled in {node_dir(task) / 'compiled'}")
    assert not (node_dir(task) / "compiled").exists()


@pytest.mark.parametrize(
    ("mode", "state", "reason"),
    [
        ("die", "signaled", "rank 0: killed by SIGKILL"),
        ("raise", "failed", "rank 0: RuntimeError: the flux is not conserved"),
        ("quit", "failed", "without a FINISHED event"),
        ("nan", "failed", "rank 0: the loss is not finite at step 3"),
    ],
)
def test_a_rank_that_fails_fails_the_node_with_its_cause(
    make_task: MakeTask, mode: str, state: str, reason: str
) -> None:
    task = make_task(mode)
    end = ended(task, start(task))
    assert (end.state, end.ranks[0].state) == ("failed", state)
    assert reason in (end.reason or "")
    assert any("STEP_END" in line for line in end.ranks[0].last_lines)


def test_a_command_that_does_not_exist_fails_the_node(make_task: MakeTask) -> None:
    task = make_task().model_copy(update={"command": ("/nowhere/python", "job.json")})
    end = ended(task, start(task))
    assert (end.state, "/nowhere/python" in (end.reason or "")) == ("failed", True)


def test_a_rank_over_its_time_limit_is_terminated(make_task: MakeTask) -> None:
    task = make_task("steps=100000", timeout_s=6.0)
    end = ended(task, start(task))
    assert (end.state, end.ranks[0].state) == ("timed_out", "timed_out")
    assert end.reason == "exceeded its time limit of 6 s"
    assert said(task, '"state": "cancelled"')


def test_a_full_disk_ends_the_job_and_is_named(make_task: MakeTask, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    task = make_task("fill", "pace=0.05", min_free_mib=0.0)
    small = node_dir(task)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)], check=True)
    try:
        end = ended(task, start(task))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert end.state == "failed"
    assert "No space left on device" in (end.reason or "")


def test_low_disk_space_ends_the_job_before_the_disk_is_full(make_task: MakeTask) -> None:
    task = make_task("steps=100000", min_free_mib=1e9)
    end = ended(task, start(task))
    assert end.state == "failed"
    assert "free space and resume" in (end.reason or "")


def test_sigterm_ends_the_job_cleanly(make_task: MakeTask) -> None:
    task = make_task("steps=100000", grace_s=20.0)
    agent = start(task)
    wait_for(lambda: said(task, "STEP_END"), "a step")
    agent.send_signal(signal.SIGTERM)
    end = ended(task, agent)
    assert (end.state, end.ranks[0].state) == ("cancelled", "cancelled")
    assert said(task, '"event": "FINISHED"')


def test_grandchildren_that_left_their_group_do_not_outlive_the_job(make_task: MakeTask) -> None:
    task = make_task("grandchild")
    agent = start(task)
    wait_for(lambda: len(descendants(agent.pid)) >= 2, "the grandchild")
    end = ended(task, agent)
    assert end.state == "succeeded"
    (warning,) = end.warnings
    assert re.fullmatch(r"the ranks left processes running, which were ended: (sleep|python\S*)", warning)
    assert left_running(Path(task.run)) == []


def test_threads_and_visible_devices_are_set_for_ranks(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = make_task()
    job = json.loads(plain.job_file.read_text())
    job["work"]["settings"]["threads"] = 3
    plain.job_file.write_text(json.dumps(job))
    task = plain.model_copy(
        update={
            "visible_devices": VisibleDevices(variable="ACME_VISIBLE_DEVICES", count=2),
            "environment": {"ACCELMARK_TEST": "$(touch x); 'y'"},
            "command": (
                "python", "-c",
                "import os, sys; print([os.environ[name] for name in sys.argv[1:]])",
                "OMP_NUM_THREADS", "ACME_VISIBLE_DEVICES", "ACCELMARK_TEST",
            ),
        }
    )  # fmt: skip
    end = ended(task, start(task))
    assert end.state == "failed"
    assert (node_dir(task) / "start_pytorch_task.log").read_text() == str(["3", "0,1", "$(touch x); 'y'"]) + "\n"


def test_secrets_printed_by_a_rank_are_not_in_a_bundle(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {
        "HF_TOKEN": "hf_Ab/cdef0123", "MY_PASSWORD": 'p"q,hunter2', "PIP_INDEX_URL": "https://bob:hunter3@host/simple",
        "TOKENIZERS_PARALLELISM": "false", "SSH_AUTH_SOCK": str(tmp_path),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    program = (
        "import json, os; t = os.environ['HF_TOKEN']; p = os.environ['MY_PASSWORD']; u = os.environ['PIP_INDEX_URL'];"
        "open('rank0.out.log', 'w').write(f'token={t}.\\n{p}\\n{u} hunter3 false\\n' + json.dumps(['\\n' + t, p]))"
    )
    task = make_task().model_copy(update={"command": ("python", "-c", program)})
    ended(task, start(task))
    assert said(task, "hf_Ab/cdef0123")
    kept = (node_dir(task) / SECRETS_FILE).read_text()
    assert not [value for value in (*values.values(), "hunter") if value in kept]
    assert (node_dir(task) / SECRETS_FILE).stat().st_mode & 0o077 == 0
    (node_dir(task).parent / SUMMARY_FILE).write_text("{}")
    write_bundle(node_dir(task).parent, tmp_path / "bundle.tar")
    unpacked, _ = unpack(tmp_path / "bundle.tar", tmp_path / "there")
    log = (unpacked / node_dir(task).name / "rank0.out.log").read_text()
    out = "(left out)"
    assert log == f'token={out}.\n{out}\nhttps://{out}@host/simple {out} false\n["\\n{out}", "{out}"]'
    assert not (unpacked / node_dir(task).name / SECRETS_FILE).exists()


SHIFTED = """
import os, pathlib, time
_offset, _time, _time_ns = pathlib.Path(os.environ["CLOCK_OFFSET_FILE"]), time.time, time.time_ns
time.time = lambda: _time() + float(_offset.read_text())
time.time_ns = lambda: _time_ns() + int(float(_offset.read_text()) * 1e9)
"""
"""Run by every Python at its start: shifts the wall clock by the value in a file."""


def test_a_clock_that_steps_back_changes_no_duration_and_no_end(make_task: MakeTask, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SHIFTED)
    recorder = TelemetryTask(vendor="cpu", vendor_folder=find("vendors", "cpu").path, interval_s=0.2)
    task = make_task("steps=40", "pace=0.1", timeout_s=120.0).model_copy(update={"telemetry": recorder})
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    agent = start(task, PYTHONPATH=path, CLOCK_OFFSET_FILE=str(clock))
    wait_for(lambda: said(task, "STEP_END"), "the first step")
    clock.write_text("-7200")
    end = ended(task, agent)
    took = time.monotonic() - began
    assert (end.state, end.reason) == ("succeeded", None)
    assert 0 < end.duration_s <= took
    lines = (node_dir(task) / "rank0.out.log").read_text().splitlines()
    events = [json.loads(line.removeprefix("[PerfLog] ")) for line in lines if line.startswith("[PerfLog]")]
    stamps = [event["metadata"]["time_ms"] for event in events]
    assert min(after - before for before, after in pairwise(stamps)) < -3_600_000, "it stepped back"
    samples = [json.loads(line) for line in (node_dir(task) / "telemetry.jsonl").read_text().splitlines()]
    monotonic = [sample["t"] for sample in samples if "t" in sample]
    assert monotonic == sorted(monotonic)
    assert len(monotonic) >= 2
