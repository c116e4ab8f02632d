"""Which checkpoints training writes and keeps, with a backend that writes files of a given size."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelmark.spec.job import TrainJob
from accelmark.spec.log.events import CheckpointHashes, Event
from accelmark.train.loop.checkpoint_writer import FIRST_STEPS, MOST_STEPS, CheckpointWriter
from accelmark.train.loop.contract import Progress
from accelmark.train.loop.window import RunTotals
from tests.train.jobs import Events, make_job


class Writing:
    """As much of a backend as writes checkpoints; each takes ``write_s`` of the clock, and a step 10 ms."""

    steps_per_epoch = 10**6
    samples_per_step = 1

    def __init__(self, directory: Path, clock: list[float], write_s: float, size: int) -> None:
        self._directory, self._clock, self._write_s, self._size = directory, clock, write_s, size
        self.newest = Progress()

    def save(self, progress: Progress) -> str:
        name = f"step{progress.global_steps:09d}"
        (self._directory / name).mkdir(parents=True)
        (self._directory / name / "weights").write_bytes(bytes(self._size))
        self.newest = copy.deepcopy(progress)
        self._clock[0] += self._write_s
        return name

    def mean(self, values: list[float]) -> list[float]:
        return values


Train = Callable[..., tuple[CheckpointHashes, list[str]]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return a function that trains in an empty directory."""

    def run(
        steps: int,
        *,
        write_s: float = 0.001,
        size: int = 1000,
        claimed: int | None = None,
        cut: int | None = None,
        lost: int = 0,
        **settings: Any,
    ) -> tuple[CheckpointHashes, list[str]]:
        """Take steps of 10 ms by a clock of its own; returns what was logged, and the directories that are left.

        Training is cut off after the step ``cut``, and resumed from its newest checkpoint without that of ``lost``.
        """
        clock = [0.0]
        monkeypatch.setattr("time.monotonic", lambda: clock[0])
        job = make_job(tmp_path, {"end.max_steps": steps, **settings})
        assert isinstance(job.work, TrainJob)
        backend: Any = Writing(tmp_path / "c", clock, write_s, size)
        work, log = job.work.model_copy(update={"is_checked": True}), Events()
        for end in filter(None, (cut, steps)):
            if lost and backend.newest.global_steps:
                shutil.rmtree(tmp_path / "c" / f"step{lost:09d}")
            totals = RunTotals(process_start=0.0, train_start=clock[0], progress=backend.newest)
            writer = CheckpointWriter(work, backend, tmp_path / "c", log, totals)
            writer.start()
            for step in range(totals.progress.global_steps + 1, end + 1):
                clock[0] += 0.01
                totals.progress.global_steps = step
                assert writer.next_due(step - 1) >= step, "no checkpoint was missed"
                if writer.is_due(step):
                    writer.save_due()
                if step == claimed:
                    writer.save_target_checkpoint()
        writer.finish()
        (hashes,) = log.values(Event.CHECKPOINTS_HASHED)
        return hashes, sorted(path.name for path in (tmp_path / "c").iterdir())

    return run


def number(name: str | None) -> int:
    return int(name.removeprefix("step")) if name is not None else 0


def test_pairs_cover_all_of_training_where_writing_is_cheap(train: Train) -> None:
    hashes, left = train(1000)
    steps = [(number(start), number(end)) for start, end in hashes.pairs]
    assert steps[0] == (0, FIRST_STEPS)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(steps))
    assert steps[-1][1] == 1000
    assert all(step % FIRST_STEPS == 0 for pair in steps for step in pair), "GRPO resumes between rollouts only"
    assert all(end - start <= MOST_STEPS for start, end in steps)
    assert sorted(hashes.sha256) == left
    assert 0.001 * len(left) < 0.004 * 10


def test_expensive_checkpoints_are_written_in_pairs_at_a_distance(train: Train) -> None:
    hashes, left = train(4000, write_s=0.02)
    steps = [(number(start), number(end)) for start, end in hashes.pairs]
    assert len(steps) >= 4
    assert {end - start for start, end in steps[1:-1]} <= {MOST_STEPS}
    assert any(end < start for (_, end), (start, _) in itertools.pairwise(steps))
    assert steps[-1][1] == 4000, "the weights that are evaluated end a pair"
    assert 0.02 * (len(left) - 3) < 0.004 * 40


def test_pairs_stay_within_their_disk_space(train: Train) -> None:
    hashes, _ = train(2000, size=2**18, **{"checkpoint.replay_mib": 2})
    assert 2 <= len(hashes.pairs) <= 8
    assert hashes.num_bytes <= 2 * 2**20 + 2 * 2**18, "the final one in addition"
    assert number(hashes.pairs[-1][1]) > 1000, "spread over all of training"


@pytest.mark.parametrize(
    ("steps", "options", "pairs", "left", "reason"),
    [
        (200, {"size": 2**20, "checkpoint.replay_mib": 1}, [(0, 8)], [8, 200], "a checkpoint takes 1 MiB"),
        (50, {"checkpoint.replay_mib": 0}, [], [50], "checkpoint.replay_mib is 0"),
        (50, {"claimed": 31, "checkpoint.replay_mib": 0}, [], [31, 50], "checkpoint.replay_mib is 0"),
        (5, {}, [(0, 5)], [5], None),
    ],
    ids=["too large", "no space", "target", "short"],
)
def test_pairs_are_left_out_with_the_reason_and_final_and_target_weights_kept(
    train: Train,
    steps: int,
    options: dict[str, Any],
    pairs: list[tuple[int, int]],
    left: list[int],
    reason: str | None,
) -> None:
    hashes, names = train(steps, **options)
    assert [(number(start), number(end)) for start, end in hashes.pairs] == pairs
    assert [number(name) for name in names] == left
    assert hashes.reason == reason if reason is None else reason in (hashes.reason or "")
    assert (number(hashes.claimed), number(hashes.final)) == (options.get("claimed", 0), steps)


def test_checkpoints_to_resume_from_are_removed_but_those_of_pairs_kept(train: Train) -> None:
    hashes, left = train(100, **{"checkpoint.every_steps": 3, "checkpoint.keep": 2})
    assert {"step000000096", "step000000099"} <= set(left)
    assert set(left) == {*hashes.sha256, "step000000096", "step000000099"}


@pytest.mark.parametrize(("every", "resumed"), [(None, 40), (3, 69)])
def test_a_resumed_training_continues_the_pairs(train: Train, every: int | None, resumed: int) -> None:
    settings: dict[str, Any] = {"checkpoint.every_steps": every, "end.max_steps": 100}
    hashes, left = train(100, cut=71, claimed=31, **settings)
    all_steps = [(number(start), number(end)) for start, end in hashes.pairs]
    assert [start % 8 for start, end in all_steps if end == 31] == [0], "one ends in the weights that are evaluated"
    steps = [(start, end) for start, end in all_steps if end != 31]
    assert (steps[0][0], steps[-1][1]) == (0, 100)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(steps))
    assert resumed in dict(steps)
    assert hashes.claimed == "step000000031"
    assert hashes.steps == {name: number(name) for name in hashes.sha256}
    assert set(hashes.sha256) <= set(left)


def test_pairs_of_a_checkpoint_that_was_lost_are_not_continued(train: Train) -> None:
    hashes, left = train(100, cut=90, lost=8)
    assert number(hashes.pairs[0][0]) == 40
    assert sorted(hashes.sha256) == left
    assert hashes.pairs[-1][1] == "step000000100"
