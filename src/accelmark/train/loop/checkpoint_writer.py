"""Save checkpoints: to resume from, to evaluate, and in pairs between which steps are replayed after the run.

Where each host has a checkpoint directory of its own, it keeps all that its ranks need to continue from a checkpoint or
to evaluate it.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.spec.errors import RunError
from accelmark.spec.job import TrainJob
from accelmark.spec.log.events import CheckpointHashes, Event, SavedCheckpoint
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Backend
from accelmark.train.loop.ends import total_steps
from accelmark.train.loop.window import RunTotals

_NAME: Final = re.compile(r"step(\d{9})")
_TEMPORARY: Final = ".tmp"
_TOKEN_BITS: Final = 24
"""Exact in a float32, as some frameworks exchange numbers."""
ExchangeMax = Callable[[list[float]], Callable[[], list[float]]]
"""Starts a maximum of each value over all ranks; the returned function waits for it."""


class CheckpointDirectory:
    """Checkpoints are written to a temporary directory and renamed: a killed process leaves complete ones only."""

    def __init__(self, path: Path, place: RankPlace, exchange_max: ExchangeMax) -> None:
        self.path, self._place, self._exchange_max = path, place, exchange_max
        self._leader: int | None = None
        if place.local_rank == 0 and path.is_dir():
            for unfinished in path.glob(f"*{_TEMPORARY}"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def temporary(self, name: str) -> Path:
        """Return the directory in which a checkpoint is written."""
        return self.path / f"{name}{_TEMPORARY}"

    def leader(self) -> int:
        """Return the lowest rank that shares this rank's directory: it writes their common files.

        The first call is collective: each host's first rank makes a subdirectory, and looks for those of earlier hosts.
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
        """Return the newest checkpoint that all hosts have, and remove later ones; None where a host has none."""
        names = (_NAME.fullmatch(path.name) for path in self.path.iterdir()) if self.path.is_dir() else ()
        steps = [int(name[1]) for name in names if name is not None]  # done at each complete checkpoint
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


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps."""
    return f"step{step:09d}"


def step_of(name: str) -> int:
    """Return the optimizer steps done at the checkpoint of this name."""
    return int(name.removeprefix("step"))


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Raise RunError for a checkpoint that is damaged or has another content than this job's."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            f"the checkpoint {checkpoint} cannot be read ({type(error).__name__}: {error}); "
            "remove it to continue from the one before it, or from the beginning"
        ) from error


FIRST_STEPS: Final = 8
"""Steps from the initial weights to the first checkpoint of a pair; the distances of the others are multiples of it.

A case whose batches depend on the one before in groups, such as GRPO's rollouts, continues exactly from between groups.
"""
MOST_STEPS: Final = 128
"""Most steps between the checkpoints of a pair."""
_LARGEST_SHARE: Final = 0.003
"""Share of training time that writing the pairs may take."""
_FEWEST: Final = 4
"""Distances into which training is divided at least, however short it is."""


class CheckpointWriter:
    """Writes the checkpoints of a rank's training, and removes those that are no longer needed.

    Replay pairs cover all of training where writing them is cheap enough: each checkpoint ends one pair and begins the
    next. Where it is not, pairs of ``MOST_STEPS`` steps are written, one at the start and then at equal distances.
    """

    def __init__(self, job: TrainJob, backend: Backend, directory: Path, log: EventLog, totals: RunTotals) -> None:
        self._settings, self._is_checked = job.settings, job.is_checked
        self._every = job.settings.checkpoint.every_steps
        self._backend, self._directory, self._log, self._totals = backend, directory, log, totals
        self._names: dict[int, str] = {}
        """Optimizer steps done -> checkpoint written by this process, or by an earlier one that it continues."""
        self._resumable: list[str] = []
        self._pairs: list[tuple[str | None, str]] = []
        self._begins: str | None = None
        """The first checkpoint of the pair in progress; None: the initial weights."""
        self._target_checkpoint: str | None = None
        self._reason: str | None = None
        self._due: float = math.inf
        self._is_open = False
        self._num_bytes = 0.0
        self._mark = (0, 0.0)
        """Optimizer steps done and training time at the checkpoint before."""
        self._unfinished: SavedCheckpoint | None = None
        """The checkpoint that may still be written while training continues."""
        self._size: int | None = None

    def start(self) -> None:
        """Note the step at which training begins; where it resumes, also the checkpoints that it continues from."""
        progress = self._totals.progress
        step = progress.global_steps
        if step:
            self._pairs = [(start, end) for start, end in progress.pairs]
            self._target_checkpoint, self._begins = progress.target_checkpoint, name_of(step)
            kept = {name for pair in self._pairs for name in pair if name is not None} - {self._begins}
            self._names = {step_of(name): name for name in (*sorted(kept), self._begins)}
        if (self._every is not None or self._is_checked) and self._directory.is_dir():
            self._resumable = sorted(path.name for path in self._directory.iterdir() if path.suffix != ".tmp")
            self._remove_oldest(self._settings.checkpoint.keep if step else 0)
        self._mark = (step, self._totals.training_s())
        if not self._is_checked or not self._settings.checkpoint.replay_mib:
            self._reason = "checkpoint.replay_mib is 0" if self._is_checked else None
            return
        self._is_open = True
        lengths = (step_of(end) - (0 if start is None else step_of(start)) for start, end in self._pairs)
        self._due = _next_multiple(step + max([FIRST_STEPS, *lengths]))
        if step:
            size = sum(size_of(self._directory / name) for name in self._names.values())
            (self._num_bytes,) = self._backend.mean([float(size)])

    def next_due(self, step: int) -> float:
        """Return the next step after ``step`` at which a checkpoint is due."""
        return min(math.inf if self._every is None else (step // self._every + 1) * self._every, self._due)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``."""
        return step >= self._due or (self._every is not None and step % self._every == 0)

    def save_due(self) -> None:
        """Write the checkpoint that is due, for resuming, for a pair, or both."""
        step = self._totals.progress.global_steps
        step_s = (self._totals.training_s() - self._mark[1]) / max(step - self._mark[0], 1)
        start = time.monotonic()
        name = self._write()
        if self._every is not None and step % self._every == 0:
            self.save_resumable()
        if step < self._due:
            return
        self._end_pair(name)
        if self._size is None:
            self.settle()
        self._schedule(step, name, *self._backend.mean([time.monotonic() - start, step_s, float(self._size or 0)]))
        self._mark = (step, self._totals.training_s())

    def _schedule(self, step: int, name: str, write_s: float, step_s: float, num_bytes: float) -> None:
        """Set the step of the next checkpoint of a pair, by the means over ranks of what the newest one cost."""
        self._num_bytes += num_bytes
        bounds = self._settings.end
        by_steps = total_steps(bounds, self._backend.steps_per_epoch, self._backend.samples_per_step)
        by_time = bounds.max_duration_s / step_s if bounds.max_duration_s and step_s else None
        total = min(filter(None, (by_steps, by_time)), default=step)
        limit = self._settings.checkpoint.replay_mib * 2**20
        num_left = math.floor((limit - self._num_bytes) / max(num_bytes, 1.0))
        if num_left < 2:
            self._due, self._is_open = math.inf, False
            if len(self._pairs) < 2:
                size = f"{num_bytes / 2**20:,.0f} MiB"
                self._reason = f"a checkpoint takes {size}, checkpoint.replay_mib is {limit // 2**20}"
            return
        by_cost = write_s / max(_LARGEST_SHARE * step_s, 1e-9)
        distance = max(min(by_cost, total / _FEWEST), (total - step) / num_left, 1)
        distance = _next_multiple(distance)
        if distance <= MOST_STEPS:
            self._begins, self._is_open, self._due = name, True, step + distance
        elif self._is_open and self._begins != name and len(self._pairs) > 1:
            self._is_open, self._due = False, step + 2 * distance - MOST_STEPS
            if by_steps is not None and step + MOST_STEPS < by_steps:  # the last steps are in a pair
                self._due = min(self._due, _next_multiple(by_steps - MOST_STEPS))
        else:
            self._begins, self._is_open, self._due = name, True, step + MOST_STEPS

    def save_resumable(self) -> None:
        """Write a checkpoint to resume from, and remove the oldest beyond ``checkpoint.keep`` once it is complete."""
        name = self._write()
        if name not in self._resumable:
            self._resumable.append(name)
        if self._unfinished is None:
            self._remove_oldest(self._settings.checkpoint.keep)

    def _remove_oldest(self, num_kept: int) -> None:
        while len(self._resumable) > num_kept:
            oldest = self._resumable.pop(0)
            if oldest not in self._needed():
                shutil.rmtree(self._directory / oldest, ignore_errors=True)

    def save_target_checkpoint(self) -> None:
        """Write the weights with which an evaluation reached the target for the first time."""
        if self._is_checked and self._target_checkpoint is None:
            self._target_checkpoint = name_of(self._totals.progress.global_steps)
            self._end_pair(self._write())

    def _end_pair(self, name: str) -> None:
        """End the pair in progress, if there is one; weights that are evaluated end one too."""
        pair = (self._begins, name)
        if self._is_open and name != self._begins and pair not in self._pairs:
            self._pairs.append(pair)

    def settle(self) -> None:
        """Wait until the newest checkpoint is complete, log it, and remove the oldest beyond ``checkpoint.keep``."""
        saved, self._unfinished = self._unfinished, None
        if saved is None:
            return
        if self._settings.checkpoint.asynchronous:
            saved = saved.model_copy(update={"background_s": round(self._backend.finish_save(), 6)})
        self._size = size_of(self._directory / saved.name)
        self._log.event(Event.CHECKPOINT, saved.model_copy(update={"num_bytes": self._size}))
        self._remove_oldest(self._settings.checkpoint.keep if self._every is not None else 0)

    def finish(self) -> None:
        """Write the final weights; the first rank of each host logs the hashes of all checkpoints that are needed."""
        if not self._is_checked and self._every is None:
            return
        final = self._write()
        self.settle()
        if not self._is_checked or RankPlace.from_environment().local_rank != 0:
            return
        self._end_pair(final)
        start = time.monotonic()
        names = sorted(self._needed() & {path.name for path in self._directory.iterdir()})
        hashes = {name: hash_of(self._directory / name) for name in names}
        value = CheckpointHashes(
            sha256=hashes,
            steps={name: step_of(name) for name in names},
            pairs=tuple(pair for pair in self._pairs if {*pair} <= {None, *hashes}),
            claimed=self._target_checkpoint if self._target_checkpoint in hashes else None,
            final=final,
            num_bytes=sum([file.stat().st_size for name in names for file in (self._directory / name).iterdir()]),
            duration_s=round(time.monotonic() - start, 6),
            reason=self._reason,
        )
        self._log.event(Event.CHECKPOINTS_HASHED, value)

    def _needed(self) -> set[str]:
        pairs, newest = {name for pair in self._pairs for name in pair}, list(self._names.values())[-1:]
        needed = (*pairs, *newest, self._begins if self._is_open else None, self._target_checkpoint)
        return {name for name in needed if name is not None}

    def _write(self) -> str:
        """Write a checkpoint of this step unless there is one; returns its name."""
        progress = self._totals.progress
        name = self._names.get(progress.global_steps)
        if name is None:
            start = time.monotonic()
            self.settle()
            open_pair = [(self._begins, name_of(progress.global_steps))] if self._is_open else []
            progress.pairs, progress.target_checkpoint = [*self._pairs, *open_pair], self._target_checkpoint
            name = self._names[progress.global_steps] = self._backend.save(progress)
            duration_s = round(time.monotonic() - start, 6)
            self._unfinished = SavedCheckpoint(name=name, global_steps=progress.global_steps, duration_s=duration_s)
            if not self._settings.checkpoint.asynchronous:
                self.settle()
        return name


def _next_multiple(steps: float) -> int:
    """Return the number of steps as a multiple of ``FIRST_STEPS``, at least ``steps``."""
    return FIRST_STEPS * math.ceil(steps / FIRST_STEPS)


def size_of(checkpoint: Path) -> int:
    """Return the bytes of a checkpoint's files, 0 where it is not on this host."""
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def hash_of(directory: Path) -> str:
    """Return the SHA-256 over names and contents of the files below ``directory``."""
    digest = hashlib.sha256()
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(directory).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
