"""Fixtures for tests of runs: a task for an agent, and the check that every test leaves no process running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelmark.run.agent.task import AgentTask, Limits
from accelmark.run.processes import RUN_MARKER
from tests.run.fakes import FAKE_RANK, job_spec, processes_with


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., AgentTask]:
    """Make the task of one agent whose rank behaves as the given modes say."""

    def make(*modes: str, **limits: float) -> AgentTask:
        node_dir = tmp_path / "round1" / "here_noderank0"
        node_dir.mkdir(parents=True)
        (tmp_path / "round1" / "job.json").write_text(job_spec().model_dump_json())
        return AgentTask(
            run=str(tmp_path),
            host="here",
            noderank=0,
            nnodes=1,
            nproc=1,
            num_ranks=1,
            command=("python", str(FAKE_RANK), "job.json", *modes),
            job_file=tmp_path / "round1" / "job.json",
            limits=Limits(**{"grace_s": 1.0, **limits}),
        )

    return make


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch leaves the place of what it compiled in the environment of the test process."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    needle = f"{RUN_MARKER}={tmp_path}".encode()
    deadline = time.monotonic() + 300
    while left := processes_with(needle):
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {[command_of(pid) for pid in left]}")
        time.sleep(0.05)


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"{pid}: ended just now"
    return f"{pid}: {b' '.join(words).decode(errors='replace')}"
