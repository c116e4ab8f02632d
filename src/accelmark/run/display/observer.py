"""The interface through which a coordinator reports progress."""

from __future__ import annotations

from typing import Self

from accelmark.plan.plan import PlannedJob
from accelmark.results.schema import RoundResult
from accelmark.run.display.progress import JobProgress
from accelmark.run.record.states import JobStatus


class RunObserver:
    """Receives the progress of a run; this class ignores it, displays override its methods."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Report that a job changed its state."""

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Report a step of preparing a job (a download, say); up to ten times a second."""

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        """Report the progress of a running job; about once a second."""

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Report the result of a round."""

    def note(self, text: str) -> None:
        """Report anything else that the user has to know."""
