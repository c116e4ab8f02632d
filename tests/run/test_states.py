"""The event log, also of a writer that was killed in the middle of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.results.schema import JobState
from accelmark.run.record.states import RunEventLog, read_events, statuses
from accelmark.spec.errors import RunError


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


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ledger = RunEventLog(path, ["a"])
    ledger.move("a", "preparing")
    ledger.move("a", "running")
    ledger.close()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([b"{", *lines[1:]]))
    with pytest.raises(RunError, match=r"line 1 is damaged"):
        read_events(path)


def test_a_job_that_is_queued_again_counts_its_attempts(tmp_path: Path) -> None:
    ledger = RunEventLog(tmp_path / "events.jsonl", ["a", "b"])
    states: tuple[JobState, ...] = ("preparing", "running", "lost", "queued", "preparing")
    for state in states:
        ledger.move("a", state, None)
    assert (ledger.jobs["a"].attempt, ledger.jobs["b"].attempt) == (2, 1)
    ledger.close()
