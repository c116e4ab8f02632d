from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accelmark.frameworks.pytorch.batches import IndexedBatches, TensorBatches
from accelmark.frameworks.pytorch.case import Place
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.batches import log_bad_samples


def place(rank: int = 0, world_size: int = 1, seed: int = 7) -> Place:
    return Place(rank, world_size, torch.device("cpu"), seed=seed + rank, shared_seed=seed)


def numbers(size: int) -> dict[str, Tensor]:
    return {"x": torch.arange(size)}


def seen(batches: TensorBatches, epoch: int = 0) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches.epoch(epoch)]


@given(size=st.integers(1, 200), batch=st.integers(1, 17), world=st.integers(1, 5), epoch=st.integers(0, 3))
def test_ranks_share_a_training_epoch_evenly_and_nobody_sees_a_sample_twice(
    size: int, batch: int, world: int, epoch: int
) -> None:
    if size < batch * world:
        with pytest.raises(DataError, match="smaller batch size"):
            TensorBatches(numbers(size), batch, place(0, world), train=True)
        return
    ranks = [TensorBatches(numbers(size), batch, place(rank, world), train=True) for rank in range(world)]
    shares = [seen(rank, epoch) for rank in ranks]
    assert {tuple(map(len, share)) for share in shares} == {(batch,) * (size // (batch * world))}
    everything = Counter(x for share in shares for one in share for x in one)
    assert set(everything.values()) == {1}
    assert sum(everything.values()) == ranks[0].num_samples


@given(size=st.integers(1, 200), batch=st.integers(1, 17), world=st.integers(1, 5))
def test_evaluation_takes_every_sample_once_in_equally_many_batches_on_all_ranks(
    size: int, batch: int, world: int
) -> None:
    if size < world:
        with pytest.raises(DataError, match="every rank"):
            TensorBatches(numbers(size), batch, place(0, world), train=False)
        return
    ranks = [TensorBatches(numbers(size), batch, place(rank, world), train=False) for rank in range(world)]
    shares = [seen(rank) for rank in ranks]
    assert sorted(x for share in shares for one in share for x in one) == list(range(size))
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(one) <= max(batch, 2) for share in shares for one in share)


def test_an_epochs_order_follows_from_seed_and_number_alone() -> None:
    batches = TensorBatches(numbers(64), 8, place(), train=True)
    first, second = seen(batches, 0), seen(batches, 1)
    assert first != second
    assert seen(TensorBatches(numbers(64), 8, place(), train=True), 1) == second
    assert seen(TensorBatches(numbers(64), 8, place(seed=8), train=True), 0) != first


def test_augmentation_is_repeatable_and_differs_between_ranks() -> None:
    def noise(batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.rand(len(batch["x"]), generator=random)}

    def draw(rank: int) -> list[float]:
        batches = TensorBatches(numbers(16), 8, place(rank, 2), train=True, augment=noise)
        return [float(x) for batch in batches.epoch(3) for x in batch["x"]]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


class Noisy:
    """Samples that show their index and a random number."""

    def __len__(self) -> int:
        return 24

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        return {"x": torch.tensor(index), "noise": torch.rand((), generator=random)}


def read(train: bool, workers: int, epoch: int) -> list[tuple[list[int], list[float]]]:
    batches = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=workers), train=train)
    return [(batch["x"].tolist(), batch["noise"].tolist()) for batch in batches.epoch(epoch)]


def test_worker_processes_give_the_same_samples_as_none() -> None:
    assert read(train=True, workers=2, epoch=1) == read(train=True, workers=0, epoch=1)


def test_a_persistent_worker_follows_the_epoch() -> None:
    batches = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=1), train=True)
    epochs = [[batch["x"].tolist() for batch in batches.epoch(number)] for number in (0, 1, 0)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


ENDING = """
import multiprocessing
from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.loop.rank import end_process
from tests.train.test_batches import IndexedBatches, Noisy, place

batches = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=1), train=True)
epoch = batches.epoch(0)
next(epoch)
print(multiprocessing.active_children()[0].pid, flush=True)
end_process(3)
"""


def test_a_rank_that_ends_within_an_epoch_leaves_no_worker() -> None:
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert not psutil.pid_exists(int(ended.stdout))


def test_training_noise_changes_with_the_epoch_and_evaluation_noise_never() -> None:
    def by_index(epoch: int, *, train: bool) -> dict[int, float]:
        batches = read(train=train, workers=0, epoch=epoch)
        return {x: noise for xs, noises in batches for x, noise in zip(xs, noises, strict=True)}

    assert by_index(0, train=True) != by_index(1, train=True)
    assert by_index(0, train=False) == by_index(1, train=False)


class Damaged(Noisy):
    """Samples of which 3, 4 and 9 cannot be read."""

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        if index in (3, 4, 9):
            raise DataError(f"sample {index} is damaged")
        return super().read(index, random)


class Log:
    """Events that were written."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def event(self, event: Event, value: Any = None, *, at_ns: int | None = None) -> None:
        assert event == Event.BAD_SAMPLE
        self.messages.append(value["message"])


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_training_samples_are_named_once_and_replaced_by_the_next(workers: int) -> None:
    loader = LoaderSettings(num_workers=workers, tolerate_bad_samples=3)
    batches, log = IndexedBatches(Damaged(), 4, place(), loader, train=True), Log()
    epochs = [
        sorted(x for batch in log_bad_samples(batches.epoch(number), batches, log) for x in batch["x"].tolist())
        for number in (0, 1, 0)
    ]
    assert epochs[0] == epochs[2] == sorted([*(set(range(24)) - {3, 4, 9}), 5, 5, 10])
    assert sorted(log.messages) == [f"sample {number} is damaged" for number in (3, 4, 9)]


@pytest.mark.parametrize(("limit", "train"), [(0, True), (1, True), (2, True), (3, False)])
def test_more_bad_samples_than_tolerated_end_the_epoch_as_any_does_in_evaluation(limit: int, train: bool) -> None:
    loader = LoaderSettings(tolerate_bad_samples=limit)
    with pytest.raises(DataError, match=r"sample \d is damaged") as caught:
        list(IndexedBatches(Damaged(), 4, place(), loader, train=train).epoch(0))
    if limit == 2:
        assert "3 training samples cannot be read; --tolerate-bad-samples allows 2" in str(caught.value)


class Rows(Noisy):
    """Samples of different sizes that show their index."""

    def __init__(self, total: int) -> None:
        self._total = total

    def __len__(self) -> int:
        return self._total

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        return {"x": torch.full((1 + index % 3, 2), index + 1), "half": torch.tensor(index).bfloat16()}


def rows(total: int, *, train: bool) -> IndexedBatches:
    return IndexedBatches(Rows(total), 2, place(), LoaderSettings(num_workers=1, prefetch=2), train=train)


@pytest.mark.parametrize("train", [True, False])
def test_batches_of_a_worker_that_are_kept_are_not_written_again(train: bool) -> None:
    """Parts of them, too, and where there are more than the memory has parts."""
    kept = [(batch["x"][1:], batch["half"]) for batch in rows(200, train=train).epoch(0)]
    alone = IndexedBatches(Rows(200), 2, place(), LoaderSettings(), train=train)
    expected = [(batch["x"][1:], batch["half"]) for batch in alone.epoch(0)]
    assert len(kept) == 100
    assert all(
        torch.equal(one, other) for pair in zip(kept, expected, strict=True) for one, other in zip(*pair, strict=True)
    )


def test_the_memory_of_freed_batches_is_used_again_also_after_an_epoch_that_was_not_read_to_its_end() -> None:
    batches = rows(100, train=True)
    for epoch in range(6):
        for number, batch in enumerate(batches.epoch(epoch)):
            assert batch["x"].max() > 0
            if epoch < 5 and number == 3:
                break
    memory = batches._samples.memory
    assert memory is not None
    used = int((memory._states != 0).sum())
    assert used <= 4, "two batches are read ahead, one is written, one is in use"
