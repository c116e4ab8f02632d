"""The interface through which a coordinator reports progress."""

from __future__ import annotations

from typing import Protocol, final

from accelmark.plan.plan import PlannedJob
from accelmark.results.schema import RoundResult
from accelmark.run.display.progress import Progress
from accelmark.run.record.states import JobStatus


class Observer(Protocol):
    """Receives everything that a user may want to see."""

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Report that a job changed its state."""
        ...

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Report a step of preparing a job (a download, say); up to ten times a second."""
        ...

    def progress(self, job: PlannedJob, progress: Progress) -> None:
        """Report the progress of a running job; about once a second."""
        ...

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Report the result of a round."""
        ...

    def note(self, text: str) -> None:
        """Report anything else that the user has to know."""
        ...


@final
class NullObserver:
    """Ignores all reports."""

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
