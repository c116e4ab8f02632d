"""Batches of NumPy arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelmark.train.batches import ArrayBatches, ArrayPlace, Arrays


def seen(batches: ArrayBatches, epoch: int = 0, skip: int = 0) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches.epoch(epoch, skip)]


@given(size=st.integers(6, 200), world=st.integers(1, 5), epoch=st.integers(0, 3), train=st.booleans())
def test_ranks_share_an_epoch(size: int, world: int, epoch: int, train: bool) -> None:
    arrays: Arrays = {"x": np.arange(size)}
    ranks = [ArrayBatches(arrays, 1, ArrayPlace(rank, world, 7), train=train) for rank in range(world)]
    shares = [seen(rank, epoch) for rank in ranks]
    assert len({len(share) for share in shares}) == 1
    samples = sorted(sample for share in shares for batch in share for sample in batch)
    assert len(samples) == len(set(samples)) == (size // world * world if train else size)


def test_each_epoch_has_an_order_of_its_own_and_resumes_within_it() -> None:
    def augment(batch: Arrays, random: np.random.Generator) -> Arrays:
        return {"x": batch["x"] * 1000 + random.integers(0, 1000, len(batch["x"]))}

    batches = ArrayBatches({"x": np.arange(40)}, 4, ArrayPlace(0, 1, 7), train=True, augment=augment)
    assert seen(batches, 1) == seen(batches, 1)
    assert seen(batches, 1) != seen(batches, 2)
    assert seen(batches, 1, skip=3) == seen(batches, 1)[3:]
