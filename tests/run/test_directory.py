"""A run's directory and its event log: permissions, runs that started nothing, and a writer that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.run.launchers.ssh.launcher import SshLauncher
from accelmark.run.record import directory
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import RunEventLog, read_events, statuses
from accelmark.spec.cluster import ClusterSpec, ContainerSpec
from accelmark.spec.errors import RunError
from tests.run.fakes import make_plan


@pytest.mark.parametrize(
    ("cluster", "mode"),
    [
        (ClusterSpec(), 0o004),
        (ClusterSpec(environment={"HF_TOKEN": "open5ame"}), 0),
        (ClusterSpec(container=ContainerSpec(engine="podman", pip_source="https://bob:hunter2@host/simple")), 0),
    ],
)
def test_only_the_owner_can_read_a_plan_with_secrets(tmp_path: Path, cluster: ClusterSpec, mode: int) -> None:
    plan = make_plan().model_copy(update={"cluster": cluster})
    RunDirectory.create(tmp_path / "run", plan)
    assert (tmp_path / "run" / "plan.json").stat().st_mode & 0o004 == mode


def test_a_run_that_was_moved_has_the_same_directory_on_its_hosts(tmp_path: Path) -> None:
    cluster = ClusterSpec.model_validate({"launcher": "ssh", "hosts": [{"address": "h1"}]})
    first = RunDirectory.create(tmp_path / "first", make_plan((), hosts=("h1",), cluster=cluster))
    before = SshLauncher(first.plan, first.path).layout
    moved = RunDirectory.open(first.path.rename(tmp_path / "moved"))
    assert SshLauncher(moved.plan, moved.path).layout.run == before.run
    second = RunDirectory.create(tmp_path / "first", first.plan)
    assert SshLauncher(second.plan, second.path).layout.run != before.run


def test_a_disk_that_is_full_at_the_start_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise RunError(f"{path}: cannot be written: the disk is full")

    monkeypatch.setattr(directory, "write_atomic", full)
    with pytest.raises(RunError, match="full"):
        RunDirectory.create(tmp_path / "runs" / "first", make_plan())
    assert not (tmp_path / "runs" / "first").exists()


def test_an_incomplete_line_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ledger = RunEventLog(path, ["a"])
    ledger.move("a", "preparing")
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"at":"2026-01-01T00:00:00Z","kind":"sta')
    again = RunEventLog(path, ["a"])
    assert again.jobs["a"].state == "preparing"
    again.note("run_resumed")
    again.move("a", "running")
    again.close()
    assert statuses(["a"], read_events(path))["a"].state == "running"
