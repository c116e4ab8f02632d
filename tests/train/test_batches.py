from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accelmark.frameworks.pytorch.batches import IndexedBatches, ReadSamples, TensorBatches, fetched_ahead, mover
from accelmark.frameworks.pytorch.case import Place
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.settings.training import LoaderSettings
from accelmark.tasks.language.data import TokenShards
from accelmark.train.batches import ArrayPlace, Arrays, SampleBatches, log_bad_samples
from tests.cases.tiny_data import save_indexed
from tests.train.jobs import Events


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


def test_worker_processes_give_the_same_samples_as_none_and_no_sample_before_a_skip_is_read() -> None:
    for workers, skip in ((0, 4), (2, 0), (2, 4)):
        assert read(train=True, workers=workers, epoch=1, skip=skip) == read(train=True, workers=0, epoch=1)[skip:]
    source, random = Noisy(), torch.get_rng_state()
    list(IndexedBatches(source, 4, place(), LoaderSettings(num_workers=0), train=True).epoch(0, 4))
    assert source.num_read == 2 * 4
    assert torch.equal(torch.get_rng_state(), random), "a run that is resumed continues the random numbers of dropout"


def test_a_persistent_worker_follows_the_epoch() -> None:
    batches = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=1), train=True)
    epochs = [[batch["x"].tolist() for batch in batches.epoch(number)] for number in (0, 1, 0)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


def test_workers_read_a_source_that_cannot_be_pickled_where_python_would_not_fork() -> None:
    multiprocessing.set_start_method("forkserver", force=True)  # the default of Python 3.14
    try:
        assert [batch["half"].tolist() for batch in rows(4, train=False).epoch(0)] == [[0, 1], [2, 3]]
    finally:
        multiprocessing.set_start_method(None, force=True)


def test_a_rank_that_ends_within_an_epoch_leaves_no_worker() -> None:
    program = (
        "import multiprocessing\n"
        "from accelmark.train.loop.rank import end_process\n"
        "from tests.train.test_batches import IndexedBatches, LoaderSettings, Noisy, place\n"
        "epoch = IndexedBatches(Noisy(), 4, place(), LoaderSettings(num_workers=1), train=True).epoch(0)\n"
        "next(epoch)\n"
        "print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "end_process(3)\n"
    )
    command = [sys.executable, "-c", program]
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


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_training_samples_are_named_once_and_replaced_by_the_next(workers: int) -> None:
    loader = LoaderSettings(num_workers=workers, tolerate_bad_samples=3)
    batches, log = IndexedBatches(Damaged(), 4, place(), loader, train=True), Events()
    epochs = [
        sorted(x for batch in log_bad_samples(batches.epoch(number), batches, log) for x in batch["x"].tolist())
        for number in (0, 1, 0)
    ]
    assert epochs[0] == epochs[2] == sorted([*(set(range(24)) - {3, 4, 9}), 5, 5, 10])
    messages = [f"sample {number} is damaged" for number in (3, 4, 9)]
    assert sorted(value["message"] for value in log.values(Event.BAD_SAMPLE)) == messages
    assert len(log) == 3


@pytest.mark.parametrize(("limit", "train"), [(0, True), (1, True), (2, True), (3, False)])
def test_more_bad_samples_than_tolerated_end_the_epoch_as_any_does_in_evaluation(limit: int, train: bool) -> None:
    loader = LoaderSettings(tolerate_bad_samples=limit)
    with pytest.raises(DataError, match=r"sample \d is damaged") as caught:
        list(IndexedBatches(Damaged(), 4, place(), loader, train=train).epoch(0))
    if limit == 2:
        assert "3 training samples cannot be read; --tolerate-bad-samples allows 2" in str(caught.value)


def rows(total: int, workers: int = 1, *, train: bool) -> IndexedBatches:
    """Return batches of samples of different sizes that show their index."""

    def read(index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        return {"x": torch.full((1 + index % 3, 2), index + 1), "half": torch.tensor(index).bfloat16()}

    loader = LoaderSettings(num_workers=workers, prefetch=2)
    return IndexedBatches(ReadSamples(total, read), 2, place(), loader, train=train)


@pytest.mark.parametrize("train", [True, False])
def test_batches_of_a_worker_that_are_kept_are_not_written_again(train: bool) -> None:
    """Parts of them, too, and where there are more than the memory has parts."""
    kept = [(batch["x"][1:], batch["half"]) for batch in rows(200, train=train).epoch(0)]
    expected = [(batch["x"][1:], batch["half"]) for batch in rows(200, 0, train=train).epoch(0)]
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


@dataclass
class NoisySource:
    """Sample i is i and a random number."""

    total: int

    def __len__(self) -> int:
        return self.total

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        if index == 39:
            raise DataError("sample 39 is damaged")
        return {"x": np.array([index, random.integers(1 << 30)])}


def seen_samples(workers: int, skip: int = 0) -> list[list[list[int]]]:
    loader = LoaderSettings(num_workers=workers)
    batches = SampleBatches(NoisySource(30), 4, ArrayPlace(0, 2, 7), loader, train=True)
    return [batch["x"].tolist() for batch in batches.epoch(0, skip)]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_yield_the_same_batches(workers: int) -> None:
    assert seen_samples(workers) == seen_samples(0)
    assert seen_samples(workers, skip=2) == seen_samples(0)[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_training_sample_is_replaced_where_it_is_tolerated(workers: int) -> None:
    loader = LoaderSettings(num_workers=workers, tolerate_bad_samples=1)
    batches = SampleBatches(NoisySource(40), 4, ArrayPlace(0, 1, 7), loader, train=True)
    assert sorted(index for batch in batches.epoch(0) for index in batch["x"][:, 0].tolist()) == [0, *range(39)]


def test_images_are_moved_in_channels_last_order() -> None:
    move = mover(torch.device("cpu"), channels_last=True)
    moved = move({"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)})
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["label"].is_contiguous()


def test_a_background_error_is_raised_where_it_is_awaited() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    ahead = fetched_ahead(broken(), depth=2)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


def test_windows_run_through_all_shards_and_cross_none(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.arange(9, dtype="<u2").tofile(tmp_path / "train/a.bin")
    np.save(tmp_path / "train/b.npy", np.arange(3, dtype=np.uint16))
    np.save(tmp_path / "train/c.npy", np.arange(100, 105, dtype=np.int32))
    shards = TokenShards(tmp_path, "train", length=5, stride=4, vocab_size=200)
    windows = [shards.window(index).tolist() for index in range(len(shards))]
    assert windows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [100, 101, 102, 103, 104]]


@pytest.mark.parametrize(("kind", "dtype"), [(4, "<i4"), (8, "<u2")])
def test_an_indexed_data_set_of_megatron_is_read_in_its_type(tmp_path: Path, kind: int, dtype: str) -> None:
    save_indexed(tmp_path / "train" / "text_document", range(30000, 30010), [3, 7], kind, dtype)
    shards = TokenShards(tmp_path, "train", 4, 3, 128_256)
    assert [shards.window(index).tolist() for index in range(len(shards))] == [
        [30000 + start + offset for offset in range(4)] for start in (0, 3, 6)
    ]


def test_only_the_first_windows_are_read_where_a_limit_is_given(tmp_path: Path) -> None:
    save_indexed(tmp_path / "val" / "text_document", range(20), [3, 17])
    assert len(TokenShards(tmp_path, "val", 4, 4, 100, limit=3)) == 3
    with pytest.raises(DataError, match="holds 5 samples of 4 tokens; 6 are needed"):
        TokenShards(tmp_path, "val", 4, 4, 100, limit=6)
