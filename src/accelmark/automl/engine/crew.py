"""The workers that an engine drives, and what it hears from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final

from accelmark.automl.engine.journal import Splits
from accelmark.automl.trial.order import Array, EpochReport, TrialOrder, TrialResult


@final
@dataclass(frozen=True, slots=True)
class Progressed:
    """A worker processed ``images`` images of its trial so far."""

    worker: int
    images: int


@final
@dataclass(frozen=True, slots=True)
class EpochReported:
    """A worker is done with an epoch."""

    worker: int
    report: EpochReport


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """A trial ended on its worker, with the weights of its best epoch where it has any."""

    worker: int
    result: TrialResult
    weights: dict[str, Array] | None


@final
@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, and its trial with it."""

    worker: int
    status: Literal["lost", "out-of-memory"]
    reason: str


@final
@dataclass(frozen=True, slots=True)
class Ready:
    """A worker (again) waits for work."""

    worker: int


Message = Progressed | EpochReported | Ended | Lost | Ready


class Crew(Protocol):
    """Workers numbered from 0, each of which carries out one trial at a time."""

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    @property
    def splits(self) -> Splits:
        """How the data are split, as the workers found them."""
        ...

    def start(self, worker: int, order: TrialOrder, weights: dict[str, Array] | None) -> None:
        """Give an idle worker a trial."""
        ...

    def cancel(self, worker: int) -> None:
        """Ask a worker to end its trial where it is and report the part that it did."""
        ...

    def replace(self, worker: int) -> None:
        """Kill a worker and put a new one in its place; its ``Ready`` follows."""
        ...

    def listen(self, timeout_s: float) -> Sequence[Message]:
        """Return what was heard, waiting at most so long for something."""
        ...

    def close(self) -> None:
        """End all workers and whatever was started for them."""
        ...
