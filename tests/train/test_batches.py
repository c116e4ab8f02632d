from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accelmark.frameworks.pytorch.batches import TORCH, Ahead, IndexedBatches, TensorBatches, mover, steps_of
from accelmark.frameworks.pytorch.case import Place
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.settings.training import LoaderSettings
from accelmark.tasks.language.data import TokenShards
from accelmark.train.batches import (
    NUMPY,
    ArrayBatches,
    ArrayKind,
    ArrayPlace,
    Arrays,
    Permutation,
    SampleBatches,
    Share,
    log_bad_samples,
    seed_of,
)


def place(rank: int = 0, world_size: int = 1, seed: int = 7) -> Place:
    return Place(rank, world_size, seed, torch.device("cpu"), seed + rank)


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


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (TORCH, lambda seed, count: torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()),
        (NUMPY, lambda seed, count: np.random.default_rng(seed).permutation(count)),
    ],
)
def test_of_an_epochs_order_a_rank_keeps_its_own_part_in_half_of_the_memory(
    kind: ArrayKind[Any, Any], order: Callable[[int, int], npt.NDArray[np.int64]]
) -> None:
    made: list[weakref.ref[Any]] = []

    def permutation(seed: int, count: int) -> Permutation:
        found = kind.permutation(seed, count)
        assert found.dtype == np.int32
        made.append(weakref.ref(found))
        return found

    whole = order(seed_of(7, 3), 10_007)
    ranks = [Share(10_007, 10, place(rank, 4), train=True).indices(permutation, 3, skip=100) for rank in range(4)]
    firsts = [next(rank) for rank in ranks]
    assert np.concatenate(firsts).tolist() == whole[4000:4040].tolist()
    assert [order() for order in made] == [None] * 4


def test_augmentation_is_repeatable_and_differs_between_ranks() -> None:
    def noise(batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.rand(len(batch["x"]), generator=random)}

    def draw(rank: int) -> list[float]:
        batches = TensorBatches(numbers(16), 8, place(rank, 2), train=True, augment=noise)
        return [float(x) for batch in batches.epoch(3) for x in batch["x"]]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    batches = TensorBatches(numbers(64), 8, place(), train=True, augment=noise)
    whole, rest = ([batch["x"].tolist() for batch in batches.epoch(1, skip)] for skip in (0, 5))
    assert rest == whole[5:]


class Noisy:
    """Samples that show their index and a random number."""

    def __len__(self) -> int:
        return 24

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        self.num_read += 1
        return {"x": torch.tensor(index), "noise": torch.rand((), generator=random)}


def read(train: bool, workers: int, epoch: int, skip: int = 0) -> list[tuple[list[int], list[float]]]:
    batches = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=workers), train=train)
    return [(batch["x"].tolist(), batch["noise"].tolist()) for batch in batches.epoch(epoch, skip)]


def test_worker_processes_give_the_same_samples_as_none() -> None:
    assert read(train=True, workers=2, epoch=1) == read(train=True, workers=0, epoch=1)


def test_an_epoch_that_begins_within_it_reads_no_sample_before() -> None:
    for workers in (0, 2):
        assert read(train=True, workers=workers, epoch=1, skip=4) == read(train=True, workers=0, epoch=1)[4:]
    source, random = Noisy(), torch.get_rng_state()
    list(IndexedBatches(source, 4, place(), LoaderSettings(num_workers=0), train=True).epoch(0, 4))
    assert source.num_read == 2 * 4
    assert torch.equal(torch.get_rng_state(), random), "a run that is resumed continues the random numbers of dropout"


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


def test_a_rank_may_keep_as_many_files_mapped_as_the_host_allows() -> None:
    """A soft limit of 1,024 open files is common, and C4 has more shards."""
    program = (
        "import resource\n"
        "from accelmark.train.loop.rank import main\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "main(['no-job.json'])\n"
        "raise SystemExit(resource.getrlimit(resource.RLIMIT_NOFILE) != (hard, hard))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


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


def seen_arrays(batches: ArrayBatches, epoch: int = 0, skip: int = 0) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches.epoch(epoch, skip)]


@given(size=st.integers(6, 200), world=st.integers(1, 5), epoch=st.integers(0, 3), train=st.booleans())
def test_ranks_share_an_epoch(size: int, world: int, epoch: int, train: bool) -> None:
    arrays: Arrays = {"x": np.arange(size)}
    ranks = [ArrayBatches(arrays, 1, ArrayPlace(rank, world, 7), train=train) for rank in range(world)]
    shares = [seen_arrays(rank, epoch) for rank in ranks]
    assert len({len(share) for share in shares}) == 1
    samples = sorted(sample for share in shares for batch in share for sample in batch)
    assert len(samples) == len(set(samples)) == (size // world * world if train else size)


def test_each_epoch_has_an_order_of_its_own_and_resumes_within_it() -> None:
    def augment(batch: Arrays, random: np.random.Generator) -> Arrays:
        return {"x": batch["x"] * 1000 + random.integers(0, 1000, len(batch["x"]))}

    batches = ArrayBatches({"x": np.arange(40)}, 4, ArrayPlace(0, 1, 7), train=True, augment=augment)
    assert seen_arrays(batches, 1) == seen_arrays(batches, 1)
    assert seen_arrays(batches, 1) != seen_arrays(batches, 2)
    assert seen_arrays(batches, 1, skip=3) == seen_arrays(batches, 1)[3:]


class NoisySource:
    """Sample i is i and a random number."""

    def __len__(self) -> int:
        return 40

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        if index == 39:
            raise DataError("sample 39 is damaged")
        return {"x": np.array([index, random.integers(1 << 30)])}


def seen_samples(
    workers: int, *, train: bool = True, epoch: int = 0, skip: int = 0, rank: int = 0
) -> list[list[list[int]]]:
    loader = LoaderSettings(num_workers=workers)
    batches = SampleBatches(Short(), 4, ArrayPlace(rank, 2, 7), loader, train=train)
    return [batch["x"].tolist() for batch in batches.epoch(epoch, skip)]


class Short(NoisySource):
    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_yield_the_same_batches(workers: int) -> None:
    assert seen_samples(workers) == seen_samples(0)
    assert seen_samples(workers, skip=2) == seen_samples(0)[2:]


def test_evaluation_reads_every_sample_once_with_the_same_numbers() -> None:
    both = [sample for rank in (0, 1) for batch in seen_samples(2, train=False, rank=rank) for sample in batch]
    assert sorted(index for index, _ in both) == list(range(30))
    assert seen_samples(2, train=False, epoch=3) == seen_samples(0, train=False)


def test_random_numbers_depend_on_the_epoch() -> None:
    first, second = (
        {index: drawn for batch in seen_samples(0, epoch=epoch) for index, drawn in batch} for epoch in (0, 1)
    )
    assert all(first[index] != second[index] for index in first.keys() & second.keys())


def test_an_error_in_a_thread_reaches_the_loop() -> None:
    batches = SampleBatches(NoisySource(), 1, ArrayPlace(0, 1, 7), LoaderSettings(num_workers=2), train=False)
    with pytest.raises(DataError, match="sample 39 is damaged"):
        list(batches.epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_training_sample_is_replaced_where_it_is_tolerated(workers: int) -> None:
    loader = LoaderSettings(num_workers=workers, tolerate_bad_samples=1)
    batches = SampleBatches(NoisySource(), 4, ArrayPlace(0, 1, 7), loader, train=True)
    assert sorted(index for batch in batches.epoch(0) for index in batch["x"][:, 0].tolist()) == [0, *range(39)]


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    return ({"x": torch.tensor([number])} for number in range(count))


def test_batches_are_grouped_by_step_and_leftovers_dropped() -> None:
    steps = list(steps_of(batches(7), 3))
    assert [[int(batch["x"]) for batch in step] for step in steps] == [[0, 1, 2], [3, 4, 5]]


def test_images_are_moved_in_channels_last_order() -> None:
    move = mover(torch.device("cpu"), channels_last=True)
    moved = move({"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)})
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["label"].is_contiguous()


def test_items_fetched_ahead_come_in_order_and_end() -> None:
    ahead = Ahead(iter(range(20)), depth=2)
    assert list(ahead) == list(range(20))
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_a_background_error_is_raised_where_it_is_awaited() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    ahead = Ahead(broken(), depth=2)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


def test_a_feed_closed_early_leaves_no_thread() -> None:
    before = threading.active_count()
    ahead = Ahead(iter(range(1000)), depth=2)
    assert next(ahead) == 0
    ahead.close()
    assert threading.active_count() == before


def write(path: Path, tokens: npt.NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.astype("<u2").tobytes())


def test_windows_run_through_all_shards_and_cross_none(tmp_path: Path) -> None:
    write(tmp_path / "train/a.bin", np.arange(9))
    write(tmp_path / "train/b.npy", np.arange(3, dtype=np.uint16))
    write(tmp_path / "train/c.npy", np.arange(100, 105, dtype=np.int32))
    shards = TokenShards(tmp_path, "train", length=5, stride=4, vocab_size=200)
    windows = [shards.window(index).tolist() for index in range(len(shards))]
    assert windows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [100, 101, 102, 103, 104]]


def test_both_file_kinds_read_the_same(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 65536, 50)
    write(tmp_path / "bin/train/x.bin", tokens)
    write(tmp_path / "npy/train/x.npy", tokens.astype(np.uint16))
    read = [TokenShards(tmp_path / kind, "train", 50, 50, 65536).window(0).tolist() for kind in ("bin", "npy")]
    assert read[0] == read[1] == tokens.tolist()


def indexed(folder: Path, tokens: list[int], kind: int, dtype: str) -> Path:
    """Write an indexed data set of Megatron-LM with two sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    np.array(tokens, dtype).tofile(folder / "text_document.bin")
    lengths = np.array([3, len(tokens) - 3], "<i4")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, kind, 2, 3)
    rest = np.array([0, 3 * np.dtype(dtype).itemsize], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
    (folder / "text_document.idx").write_bytes(head + lengths.tobytes() + rest)
    return folder / "text_document.bin"


@pytest.mark.parametrize(("kind", "dtype"), [(4, "<i4"), (8, "<u2")])
def test_an_indexed_data_set_of_megatron_is_read_in_its_type(tmp_path: Path, kind: int, dtype: str) -> None:
    indexed(tmp_path / "train", list(range(30000, 30010)), kind, dtype)
    shards = TokenShards(tmp_path, "train", 4, 3, 128_256)
    assert [shards.window(index).tolist() for index in range(len(shards))] == [
        [30000 + start + offset for offset in range(4)] for start in (0, 3, 6)
    ]


def test_of_an_index_of_megatron_only_the_last_sequence_is_read(tmp_path: Path) -> None:
    data = indexed(tmp_path / "train", list(range(10)), 4, "<i4")
    num_sequences, header = 30_000_000, struct.calcsize("<9sQBQQ")
    with data.with_suffix(".idx").open("wb") as file:  # a sparse file; all other lengths are 0
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, num_sequences, num_sequences + 1))
        for place, number in ((4 * num_sequences - 4, 7), (12 * num_sequences - 8, 12)):
            file.seek(header + place)
            file.write(number.to_bytes(4, "little"))
        file.truncate(header + 20 * num_sequences + 8)
    tracemalloc.start()
    assert len(TokenShards(tmp_path, "train", 4, 3, 100)) == 3
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
    os.truncate(data.with_suffix(".idx"), 1000)
    with pytest.raises(DataError, match=r"has 40 bytes, .* is the file complete"):
        TokenShards(tmp_path, "train", 4, 3, 100)


def test_only_the_first_windows_are_read_where_a_limit_is_given(tmp_path: Path) -> None:
    indexed(tmp_path / "val", list(range(20)), 4, "<i4")
    assert len(TokenShards(tmp_path, "val", 4, 4, 100, limit=3)) == 3
    with pytest.raises(DataError, match="holds 5 samples of 4 tokens; 6 are needed"):
        TokenShards(tmp_path, "val", 4, 4, 100, limit=6)
