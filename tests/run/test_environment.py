"""What ranks are started with: AccelMark is found, and a user's own path is kept."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import accelmark
from accelmark.run.agent.environment import rank_environment
from accelmark.run.agent.rank_exit import read_log_end
from accelmark.run.agent.task import AgentTask

OURS = str(Path(accelmark.__file__).parents[1])


@pytest.mark.parametrize(
    ("ambient", "asked", "path"),
    [
        (OURS, "/opt/lib:/opt/more", f"{OURS}:/opt/lib:/opt/more"),
        (f"/own:{OURS}/", f"/opt/lib:{OURS}", f"{OURS}:/opt/lib"),
        (OURS, None, OURS),
        ("/own", "/opt/lib", "/opt/lib"),
        (None, "/opt/lib", "/opt/lib"),
        (None, None, None),
    ],
)
def test_a_path_of_the_cluster_file_stands_behind_accelmark(
    make_task: Callable[..., AgentTask], tmp_path: Path, ambient: str | None, asked: str | None, path: str | None
) -> None:
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": asked} if asked else {}})
    found = rank_environment(task, tmp_path, {"PYTHONPATH": ambient} if ambient else {})
    assert found.get("PYTHONPATH") == path


def test_what_is_installed_does_not_hide_what_the_path_offers(
    make_task: Callable[..., AgentTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: OURS)
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": "/opt/lib"}})
    assert rank_environment(task, tmp_path, {"PYTHONPATH": OURS})["PYTHONPATH"] == "/opt/lib"


@pytest.mark.parametrize(
    "said",
    [
        "/opt/my env/bin/python3.11: Error while finding module specification for 'accelmark.train.loop.rank' "
        "(ModuleNotFoundError: No module named 'accelmark')",
        "/usr/bin/python3: No module named accelmark",
        "python: can't open file '/nowhere/rank.py': [Errno 2] No such file or directory",
    ],
)
def test_what_python_says_where_it_finds_nothing_to_run_is_the_cause(tmp_path: Path, said: str) -> None:
    log = tmp_path / "start_pytorch_task.log"
    log.write_text(f"module loaded\n{said}\n")
    assert read_log_end(log).cause == said
