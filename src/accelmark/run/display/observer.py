"""Who is told while a run goes on: a terminal, plain lines, JSON lines, a test."""

from __future__ import annotations

from typing import Protocol, final

from accelmark.plan.plan import PlannedJob
from accelmark.results.schema import RoundResult
from accelmark.run.display.progress import Progress
from accelmark.run.record.states import JobStatus


class Watcher(Protocol):
    """Is told of everything that a person would want to see."""

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Tell that a job changed its state."""
        ...

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Tell what is being done for a job before it runs (a download, say); up to ten times a second."""
        ...

    def progress(self, job: PlannedJob, progress: Progress) -> None:
        """Tell how far a running job is; about once a second."""
        ...

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Tell what a round came to."""
        ...

    def note(self, text: str) -> None:
        """Tell something else that a person has to know."""
        ...


@final
class Silence:
    """Tells nobody."""

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Ignore it."""

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Ignore it."""

    def progress(self, job: PlannedJob, progress: Progress) -> None:
        """Ignore it."""

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""
