"""A run's directory: layout, lock and contents."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, Self

from pydantic import ValidationError

from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.results.schema import Summary
from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.results.store.loaded_run import EVENTS_FILE, HOLDER_FILE, PLAN_FILE, is_in_progress
from accelmark.run.processes import ProcessId
from accelmark.run.record.states import JobStatus, RunEvent, RunEventLog, read_events, statuses
from accelmark.spec.errors import RequestError, RunError, raising
from accelmark.spec.secret import secrets_in

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def require_empty(path: Path) -> None:
    """Check that a new run may use ``path``, which need not exist. Raises RequestError: it is not empty."""
    with write_errors(path):
        held = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if held:
        what = "is not empty:"
        if PLAN_FILE in held:
            what = f"contains a run: continue it with 'accelmark resume {path}', or"
        raise RequestError(f"{path}: {what} choose another directory with --out")


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def create(cls, path: Path, plan: Plan) -> Self:
        """Create the directory of a new run. Raises RequestError: it is not empty."""
        path = path.resolve()
        make_directory(path)
        require_empty(path)
        with write_errors(path / HOLDER_FILE):
            try:
                (path / HOLDER_FILE).touch(exist_ok=False)
            except FileExistsError:  # another run is starting there
                require_empty(path)
        directory = cls(path, plan)
        try:
            directory.replace_plan(plan.model_copy(update={"run_id": f"{path.name}-{secrets.token_hex(4)}"}))
        except RunError:
            directory.discard()
            raise
        return directory

    def replace_plan(self, plan: Plan) -> None:
        """Write another plan, before anything of the run has started or with the next jobs of a search."""
        # A resumed run needs the secrets of the cluster file: only the owner may read them.
        private = any(secrets_in(plan.model_dump(mode="json")))
        write_atomic(self.path / PLAN_FILE, plan.model_dump_json(indent=2), private=private)
        self.plan = plan

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory of an existing run. Raises RequestError: there is none; RunError: its plan is damaged."""
        path = path.resolve()
        what = f"{path / PLAN_FILE}: cannot be read, was written by another version of AccelMark or is damaged"
        with raising(RunError, what, OSError, ValidationError):
            if not (path / PLAN_FILE).exists():
                raise RequestError(f"{path}: is not a run directory: it has no {PLAN_FILE}")
            return cls(path, Plan.model_validate_json((path / PLAN_FILE).read_bytes()))

    def discard(self) -> None:
        """Remove the directory of a run that started nothing."""
        shutil.rmtree(self.path, ignore_errors=True)

    def round_dir(self, job: PlannedJob) -> Path:
        """Return the directory of a job."""
        return self.path / job.directory

    def node_dir(self, job: PlannedJob, node: PlannedNode) -> Path:
        """Return the directory of a job on one host."""
        return self.round_dir(job) / f"{safe_name(node.host)}_noderank{node.noderank}"

    def events(self) -> list[RunEvent]:
        """Return the event log."""
        return read_events(self.path / EVENTS_FILE)

    def statuses(self) -> dict[str, JobStatus]:
        """Return the status of each job, from the event log."""
        return statuses((job.directory for job in self.plan.jobs), self.events())

    def event_log(self) -> RunEventLog:
        """Open the event log for writing."""
        return RunEventLog(self.path / EVENTS_FILE, (job.directory for job in self.plan.jobs))

    def coordinator(self) -> ProcessId | None:
        """Return the running coordinator that has locked this run, on this machine or another one, or None."""
        holder = ProcessId.stored(self.path / HOLDER_FILE)
        if holder is not None and (is_in_progress(self.path) if holder.is_elsewhere else holder.alive):
            return holder
        return None

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run; see :func:`lock_directory`."""
        return lock_directory(self.path)


@contextmanager
def lock_directory(directory: Path, verbs: str = "accelmark") -> Iterator[None]:
    """Lock the directory of a run or search; the lock ends with this process. Raises RequestError: it is locked."""
    path = directory / HOLDER_FILE
    with write_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = ProcessId.stored(path)
            who = f"process {holder.pid} on {holder.hostname}" if holder else "another process"
            advice = f"see '{verbs} status {directory}', or stop it with '{verbs} stop {directory}'"
            raise RequestError(f"{directory}: is in progress, locked by {who}: {advice}") from error
        with write_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, ProcessId.own().model_dump_json().encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def default_path(name: str, now: datetime, parent: Path = Path("runs")) -> Path:
    """Return ``runs/<UTC time>-<name>``, numbered where that exists."""
    path = parent / f"{now.strftime('%Y%m%dT%H%M%SZ')}-{safe_name(name)}"
    number = 2
    while path.exists():
        path = path.with_name(f"{path.name.removesuffix(f'-{number - 1}')}-{number}")
        number += 1
    return path


def safe_name(name: str) -> str:
    """Return ``name`` with other characters than letters, digits, dots, dashes and underscores replaced by dashes."""
    return _UNSAFE.sub("-", name).strip(".-") or "unnamed"


def measure_run(run_dir: Path, *, recompute: bool = False) -> Summary:
    """Write ``summary.json`` and ``MANIFEST.sha256``; see :func:`accelmark.results.rounds.summary.summarise`."""
    from accelmark.audit.verdict import audit_case
    from accelmark.results.rounds.summary import summarise

    return summarise(run_dir, audit_case, recompute=recompute)
