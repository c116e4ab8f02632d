"""The directory of a job's checkpoints as a rank sees it: the hosts share one, or each has its own.

Where each host has its own, it keeps all that its ranks need to continue from a checkpoint or to evaluate it.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import RankPlace

_NAME: Final = re.compile(r"step(\d{9})")
_TEMPORARY: Final = ".tmp"
_TOKEN_BITS: Final = 24
"""Exact in a float32, as some frameworks exchange numbers."""
ExchangeMax = Callable[[list[float]], Callable[[], list[float]]]
"""Starts a maximum of each value over all ranks; the returned function waits for it."""


@final
class CheckpointDirectory:
    """Checkpoints are written to a temporary directory and renamed: a killed process leaves complete ones only.

    The first rank of each host removes what a killed process left unfinished.
    """

    def __init__(self, path: Path, place: RankPlace, exchange_max: ExchangeMax) -> None:
        self.path = path
        self._place = place
        self._exchange_max = exchange_max
        self._leader: int | None = None
        if place.local_rank == 0 and path.is_dir():
            for unfinished in path.glob(f"*{_TEMPORARY}"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def temporary(self, name: str) -> Path:
        """Return the directory in which a checkpoint is written."""
        return self.path / f"{name}{_TEMPORARY}"

    def leader(self) -> int:
        """Return the lowest rank that shares this rank's directory: it writes their common files.

        The first call is collective: the first rank of each host makes a subdirectory, and every rank looks for those
        of the hosts before its own.
        """
        if self._leader is None:
            self._leader = 0 if self._place.world_size == self._place.local_world_size else self._find_leader()
        return self._leader

    def _find_leader(self) -> int:
        place = self._place
        draw = secrets.randbits(_TOKEN_BITS) if place.rank == 0 else 0
        (token,) = self._exchange_max([float(draw)])()  # every rank has removed unfinished files by now

        def probe(rank: int) -> Path:
            return self.path / f"probe{int(token)}-{rank}{_TEMPORARY}"

        first_here = place.rank - place.local_rank
        if place.local_rank == 0:
            probe(place.rank).mkdir(parents=True)
        self._exchange_max([0.0])()
        first_of_hosts = range(0, first_here, place.local_world_size)
        leader = next((rank for rank in first_of_hosts if probe(rank).exists()), first_here)
        self._exchange_max([0.0])()
        if place.local_rank == 0:
            probe(place.rank).rmdir()
        return leader

    def complete(self, name: str) -> None:
        """Rename a checkpoint that is written, in place of one of that name."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        self.temporary(name).rename(self.path / name)

    def newest(self) -> Path | None:
        """Return the newest checkpoint that all hosts have, and remove later ones; None where a host has none.

        Raises:
            RunError: this host lacks it.
        """
        steps = self._steps()
        newest = max(steps, default=-1)
        if self._place.world_size > 1:
            newest = -round(self._exchange_max([-float(newest)])()[0])
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
        names = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)


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
