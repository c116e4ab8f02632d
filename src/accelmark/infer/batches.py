"""Implementations of ``InferBatches``: data in memory, from files, synthetic, or the first part of other data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accelmark.infer.case import InferBatch, InferBatches
from accelmark.spec.errors import DataError


@final
class TensorBatches:
    """A data set in memory, as tensors."""

    def __init__(self, inputs: Sequence[Tensor], labels: Tensor, batch_size: int) -> None:
        self.inputs = tuple(inputs)
        self.labels = labels
        self.batch_size = batch_size

    @property
    def num_items(self) -> int:
        """Number of items in one pass."""
        return int(self.labels.shape[0])

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass; every batch is a copy, as with a data loader."""
        for start in range(0, self.num_items, self.batch_size):
            part = slice(start, start + self.batch_size)
            yield InferBatch(tuple(each[part].clone() for each in self.inputs), self.labels[part])


@final
class LoaderBatches:
    """A data set that is read item by item, in worker processes if ``num_workers`` is positive."""

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, num_workers: int, collate: Callable[[list[Any]], InferBatch]
    ) -> None:
        self.dataset = dataset
        self.num_items = len(dataset)  # type: ignore[arg-type] # a map-style data set has a length
        self.loader: DataLoader[Any] | None = None
        if self.num_items:
            self.loader = DataLoader(
                dataset,
                batch_size=batch_size,
                num_workers=num_workers,
                collate_fn=collate,
                persistent_workers=num_workers > 0,
            )

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass."""
        return iter(self.loader) if self.loader is not None else iter(())


@final
class SyntheticBatches:
    """Synthetic items in a fixed number of batches, created once."""

    def __init__(self, make: Callable[[int], InferBatch], batch_size: int, num_batches: int) -> None:
        self.batches = tuple(make(batch_size) for _ in range(num_batches))
        self.num_items = batch_size * num_batches

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass."""
        return iter(self.batches)


@final
class PinnedBatches:
    """Another data set with its batches in page-locked memory; calls do not include the time of pinning."""

    def __init__(self, whole: InferBatches) -> None:
        self.whole = whole
        self.num_items = whole.num_items

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass."""
        return (batch.pinned() for batch in self.whole)


@final
class FirstBatches:
    """The first batches of another data set."""

    def __init__(self, whole: InferBatches, num_batches: int, batch_size: int) -> None:
        self.whole = whole
        self.num_batches = num_batches
        self.num_items = min(whole.num_items, num_batches * batch_size)

    def __iter__(self) -> Iterator[InferBatch]:
        """Start a pass."""
        return islice(iter(self.whole), self.num_batches)


def not_empty(batches: InferBatches, where: str) -> InferBatches:
    """Return ``batches``.

    Raises:
        DataError: it has no item.
    """
    if batches.num_items < 1:
        raise DataError(f"{where}: the data has no item; check the data directory of the run")
    return batches
