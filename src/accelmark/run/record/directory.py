"""A run's directory: its layout, who holds it, and what is in it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, Self, final

from pydantic import ValidationError

from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.run.agent.processes import ProcessId
from accelmark.run.record.states import JobStatus, Ledger, RunEvent, read_events, statuses
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.secret import secrets_in

PLAN_FILE: Final = "plan.json"
EVENTS_FILE: Final = "events.jsonl"
HOLDER_FILE: Final = "run.pid"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


@final
class RunDirectory:
    """The directory of one run; making one or opening it for writing is the only way in for a coordinator."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def create(cls, path: Path, plan: Plan) -> Self:
        """Make the directory of a new run.

        Raises:
            RequestError: the directory holds something already, another run in particular.
            RunError: it cannot be written.
        """
        make_directory(path)
        path = path.resolve()
        with write_errors(path):
            held = sorted(entry.name for entry in path.iterdir())
        if held:
            what = "holds a run already" if PLAN_FILE in held or HOLDER_FILE in held else "is not empty"
            advice = f"go on with it by 'accelmark resume {path}', or choose another place with --out"
            raise RequestError(f"{path}: {what}: {advice}")
        try:
            with write_errors(path / HOLDER_FILE):
                os.close(os.open(path / HOLDER_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except RunError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise RequestError(f"{path}: another run is starting there: choose another place with --out") from error
            raise
        # A run that goes on later needs what the cluster file said, secrets too: they are for their owner alone.
        private = any(secrets_in(plan.model_dump(mode="json")))
        write_atomic(path / PLAN_FILE, plan.model_dump_json(indent=2), private=private)
        return cls(path, plan)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory of a run that was started before.

        Raises:
            RequestError: it is not the directory of a run.
            RunError: its plan cannot be read.
        """
        path = path.resolve()
        try:
            text = (path / PLAN_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(f"{path}: is not the directory of a run: there is no {PLAN_FILE}") from error
        except OSError as error:
            raise RunError(f"{path / PLAN_FILE}: cannot be read: {error.strerror}") from error
        try:
            return cls(path, Plan.model_validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            what = f"was written by another version of AccelMark or is damaged: {place}: {first['msg']}"
            raise RunError(f"{path / PLAN_FILE}: {what}") from error

    def discard(self) -> None:
        """Remove the directory of a run that nothing was started of."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.name

    def round_dir(self, job: PlannedJob) -> Path:
        """Return where a job's files are."""
        return self.path / job.directory

    def node_dir(self, job: PlannedJob, node: PlannedNode) -> Path:
        """Return where the files of a job's part on one host are."""
        return self.round_dir(job) / f"{safe_name(node.host)}_noderank{node.noderank}"

    def events(self) -> list[RunEvent]:
        """Return all that the coordinators of this run wrote down."""
        return read_events(self.path / EVENTS_FILE)

    def statuses(self) -> dict[str, JobStatus]:
        """Return where each job stands, as last written down."""
        return statuses((job.directory for job in self.plan.jobs), self.events())

    def ledger(self) -> Ledger:
        """Open the event log for writing."""
        return Ledger(self.path / EVENTS_FILE, (job.directory for job in self.plan.jobs))

    def holder(self) -> ProcessId | None:
        """Return the living coordinator that holds this run, or None."""
        return holder_of(self.path)

    def held(self) -> AbstractContextManager[None]:
        """Hold the run; see :func:`hold`."""
        return hold(self.path)


def holder_of(directory: Path) -> ProcessId | None:
    """Return the living process that holds the run or search in a directory, or None."""
    holder = ProcessId.read(directory / HOLDER_FILE)
    return holder if holder is not None and holder.alive else None


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold the run or search in a directory; the end of the process releases it.

    Raises:
        RequestError: another process holds it.
    """
    path = directory / HOLDER_FILE
    with write_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = holder_of(directory)
            who = f"process {holder.pid}" if holder else "another process"
            advice = f"see 'accelmark status {directory}', or end it with 'accelmark stop {directory}'"
            raise RequestError(f"{directory}: is in progress, held by {who}: {advice}") from error
        identity = ProcessId.of(os.getpid())
        assert identity is not None  # noqa: S101  a process can always see itself
        with write_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, identity.model_dump_json().encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def default_path(name: str, now: datetime, parent: Path = Path("runs")) -> Path:
    """Return ``runs/<UTC stamp>-<name>``, numbered where that exists already."""
    path = parent / f"{now.strftime('%Y%m%dT%H%M%SZ')}-{safe_name(name)}"
    number = 2
    while path.exists():
        path = path.with_name(f"{path.name.removesuffix(f'-{number - 1}')}-{number}")
        number += 1
    return path


def safe_name(name: str) -> str:
    """Return ``name`` with everything that is not a letter, digit, dot, dash or underscore as one dash."""
    return _UNSAFE.sub("-", name).strip(".-") or "unnamed"
