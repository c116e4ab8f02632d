"""The directory of a job's checkpoints as a rank sees it: the hosts share one, or each has its own.

Where each host has its own, it keeps all that its ranks need to continue from a checkpoint or to evaluate it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import RankPlace

_NAME: Final = re.compile(r"step(\d{9})")
_TEMPORARY: Final = ".tmp"


@final
class CheckpointDirectory:
    """Checkpoints are written to a temporary directory and renamed: a killed process leaves complete ones only.

    The first rank of each host removes what a killed process left unfinished.
    """

    def __init__(self, path: Path, place: RankPlace) -> None:
        self.path = path
        self._place = place
        if place.local_rank == 0 and path.is_dir():
            for unfinished in path.glob(f"*{_TEMPORARY}"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def temporary(self, name: str) -> Path:
        """Return the directory in which a checkpoint is written."""
        return self.path / f"{name}{_TEMPORARY}"

    def leader(self, written: Path) -> int:
        """Return the rank that writes what the ranks that share this rank's directory have in common, and completes it.

        That is rank 0, or the first rank of a host that does not see what rank 0 has ``written``.
        """
        place = self._place
        return 0 if place.rank == 0 or written.exists() else place.rank - place.local_rank

    def complete(self, name: str) -> None:
        """Rename a checkpoint that is written, in place of one of that name."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        self.temporary(name).rename(self.path / name)

    def newest(self, exchange_max: Callable[[list[float]], Callable[[], list[float]]]) -> Path | None:
        """Return the newest checkpoint that all hosts have, and remove later ones; None where a host has none.

        Raises:
            RunError: this host lacks it.
        """
        steps = self._steps()
        newest = max(steps, default=-1)
        if self._place.world_size > 1:
            newest = -round(exchange_max([-float(newest)])()[0])
        if newest < 0:
            return None
        if newest not in steps:
            raise RunError(
                f"{self.path / name_of(newest)}: is missing on this host, other hosts have none that is newer; "
                "remove the checkpoints on all hosts to begin again"
            )
        for step in steps if self._place.local_rank == 0 else ():
            if step > newest:
                shutil.rmtree(self.path / name_of(step), ignore_errors=True)
        return self.path / name_of(newest)

    def _steps(self) -> list[int]:
        """Return the optimizer steps done at each complete checkpoint."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in found if name is not None)


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps."""
    return f"step{step:09d}"


def step_of(name: str) -> int:
    """Return the optimizer steps done at the checkpoint of this name."""
    return int(name.removeprefix("step"))


def unreadable(checkpoint: Path, error: Exception) -> RunError:
    """Return the error of a checkpoint that is damaged or has another content than this job's."""
    return RunError(
        f"the checkpoint {checkpoint} cannot be read ({type(error).__name__}: {error}); "
        "remove it to continue from the one before it, or from the beginning"
    )
