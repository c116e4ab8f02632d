"""Batches of a source that is read by sample."""

from __future__ import annotations

import numpy as np
import pytest

from accelmark.spec.errors import DataError
from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.batches import ArrayPlace, Arrays, SampleBatches


class Noisy:
    """Sample i is i and a random number."""

    def __len__(self) -> int:
        return 40

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        if index == 39:
            raise DataError("sample 39 is damaged")
        return {"x": np.array([index, random.integers(1 << 30)])}


def seen(workers: int, *, train: bool = True, epoch: int = 0, skip: int = 0, rank: int = 0) -> list[list[list[int]]]:
    loader = LoaderSettings(num_workers=workers)
    batches = SampleBatches(Short(), 4, ArrayPlace(rank, 2, 7), loader, train=train)
    return [batch["x"].tolist() for batch in batches.epoch(epoch, skip)]


class Short(Noisy):
    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_yield_the_same_batches(workers: int) -> None:
    assert seen(workers) == seen(0)
    assert seen(workers, skip=2) == seen(0)[2:]


def test_evaluation_reads_every_sample_once_with_the_same_numbers() -> None:
    both = [sample for rank in (0, 1) for batch in seen(2, train=False, rank=rank) for sample in batch]
    assert sorted(index for index, _ in both) == list(range(30))
    assert seen(2, train=False, epoch=3) == seen(0, train=False)


def test_random_numbers_depend_on_the_epoch() -> None:
    first, second = ({index: drawn for batch in seen(0, epoch=epoch) for index, drawn in batch} for epoch in (0, 1))
    assert all(first[index] != second[index] for index in first.keys() & second.keys())


def test_an_error_in_a_thread_reaches_the_loop() -> None:
    batches = SampleBatches(Noisy(), 1, ArrayPlace(0, 1, 7), LoaderSettings(num_workers=2), train=False)
    with pytest.raises(DataError, match="sample 39 is damaged"):
        list(batches.epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_training_sample_is_replaced_where_it_is_tolerated(workers: int) -> None:
    loader = LoaderSettings(num_workers=workers, tolerate_bad_samples=1)
    batches = SampleBatches(Noisy(), 4, ArrayPlace(0, 1, 7), loader, train=True)
    assert sorted(index for batch in batches.epoch(0) for index in batch["x"][:, 0].tolist()) == [0, *range(39)]
