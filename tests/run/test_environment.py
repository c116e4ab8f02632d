"""The environment of ranks: AccelMark is importable, and the user's PYTHONPATH is kept."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import accelmark
from accelmark.run.agent.agent import rank_environment
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
def test_a_pythonpath_of_the_cluster_file_comes_after_accelmark(
    make_task: Callable[..., AgentTask], tmp_path: Path, ambient: str | None, asked: str | None, path: str | None
) -> None:
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": asked} if asked else {}})
    found = rank_environment(task, tmp_path, {"PYTHONPATH": ambient} if ambient else {})
    assert found.get("PYTHONPATH") == path


def test_installed_packages_do_not_hide_those_on_pythonpath(
    make_task: Callable[..., AgentTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: OURS)
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": "/opt/lib"}})
    assert rank_environment(task, tmp_path, {"PYTHONPATH": OURS})["PYTHONPATH"] == "/opt/lib"
