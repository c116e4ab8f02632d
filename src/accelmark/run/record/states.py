"""States of jobs, and the event log of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import ValidationError

from accelmark.results.schema import JobState
from accelmark.results.store.files import write_errors
from accelmark.spec.errors import RunError, raising
from accelmark.spec.log.records import ClockReading
from accelmark.spec.model import Spec

_LOG: Final = logging.getLogger("accelmark")
ENDS: Final[frozenset[JobState]] = frozenset({"succeeded", "failed", "timed_out", "lost", "cancelled"})
EventKind = Literal["run_started", "run_resumed", "state", "agents_ended", "note", "run_finished"]


class RunEvent(Spec):
    """One line of ``events.jsonl``."""

    at: str
    """UTC, ISO 8601. The order of lines is the order of events, since a clock may step back."""
    mono_s: float | None = None
    """``time.monotonic`` of the coordinator."""
    uptime_s: float | None = None
    """``/proc/uptime`` of its machine."""
    kind: EventKind
    job: str | None = None
    """``<key slug>/round<N>``."""
    state: JobState | None = None
    reason: str | None = None
    attempt: int = 1
    """Increased each time the job is queued again."""


class JobStatus(NamedTuple):
    """The current state of a job."""

    state: JobState = "queued"
    reason: str | None = None
    attempt: int = 1
    since: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final unless the job is queued again."""
        return self.state in ENDS


def utc_now() -> str:
    """Return the current UTC time, ISO 8601, in milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_events(path: Path) -> list[RunEvent]:
    """Read an event log; an incomplete last line of a killed writer is ignored.

    Raises RunError: the file cannot be read, or a line other than the last is damaged.
    """
    lines: list[bytes] = []
    with raising(RunError, f"{path}: cannot be read", OSError), suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines()
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(RunEvent.model_validate_json(line))
        except ValidationError as error:
            # A run resumed after its writer was killed has an incomplete line before the lines of the resumption.
            if number < len(lines) and not any(b'"run_resumed"' in later for later in lines[number:]):
                raise RunError(f"{path}: line {number} is damaged") from error
    return events


def statuses(jobs: Iterable[str], events: Iterable[RunEvent]) -> dict[str, JobStatus]:
    """Replay ``events`` into the status of each job."""
    current = {job: JobStatus() for job in jobs}
    for event in events:
        if event.kind == "state" and event.job in current and event.state is not None:
            current[event.job] = JobStatus(event.state, event.reason, event.attempt, event.at)
    return current


class RunEventLog:
    """The event log opened for writing: each state change is written before it takes effect."""

    def __init__(self, path: Path, jobs: Iterable[str]) -> None:
        self._path = path
        events = read_events(path)
        self.num_events = len(events)
        self.jobs: dict[str, JobStatus] = statuses(jobs, events)
        with write_errors(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            written = self._path.read_bytes()
            if written and not written.endswith(b"\n"):
                os.write(self._descriptor, b"\n")

    def move(self, job: str, state: JobState, reason: str | None = None) -> None:
        """Change the state of ``job``. Raises RunError: the log cannot be written."""
        attempt = self.jobs[job].attempt + (state == "queued")
        event = RunEvent(at=utc_now(), kind="state", job=job, state=state, reason=reason, attempt=attempt)
        self._append(event)
        self.jobs[job] = JobStatus(state, reason, attempt, event.at)

    def note(self, kind: EventKind, reason: str | None = None, job: str | None = None) -> None:
        """Write an event that is not a state change."""
        self._append(RunEvent(at=utc_now(), kind=kind, job=job, reason=reason))

    def close(self) -> None:
        """Close the log."""
        os.close(self._descriptor)

    def _append(self, event: RunEvent) -> None:
        now = ClockReading.now()
        stamped = event.model_copy(update={"mono_s": now.mono_s, "uptime_s": now.uptime_s})
        line = stamped.model_dump_json(exclude_none=True).encode() + b"\n"
        level = logging.ERROR if event.state in ENDS - {"succeeded"} else logging.INFO
        _LOG.log(level, "%s", ": ".join(filter(None, (event.kind, event.job, event.state, event.reason))))
        with write_errors(self._path):
            os.write(self._descriptor, line)
            os.fsync(self._descriptor)
        self.num_events += 1
