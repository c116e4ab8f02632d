"""A slow rank is found by where the time of all ranks went, in a run of real processes."""

from pathlib import Path

import pytest

from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import describe, find_straggler, times_of_ranks
from accelmark.results.schema import RankTime, RankTimes
from tests.train.jobs import Ran, make_job, run
from tests.train.test_ranks import extern_of

SLOW_RANK = """
    def backward(self, loss, scaler):
        if self.place.rank == 1:
            import time
            time.sleep(0.15)
        super().backward(loss, scaler)
"""


def times(ran: Ran) -> RankTimes | None:
    node = NodeDir(ran.node_dir, "n1", 0, None, None)
    timeline = read_timeline(node.rank_logs())
    assert timeline is not None, ran.output
    return times_of_ranks(timeline, [node])


@pytest.mark.heavy
def test_a_rank_that_computes_longer_is_named_and_the_others_wait_for_it(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "batch_size": 4}
    ran = run(make_job(tmp_path, settings, nproc=2, extern=extern_of(tmp_path, SLOW_RANK)), tmp_path)
    found = times(ran)
    assert found is not None, ran.output
    fast, slow = found.ranks
    assert slow.own_ms - fast.own_ms > 200, "two backward passes of 150 ms, less what the other may lose to load"
    assert fast.wait_ms > 200
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


@pytest.mark.parametrize(
    ("parallelism", "nproc"),
    [
        ("fsdp2", 2),
        pytest.param("dp=2", 2, marks=pytest.mark.heavy),
        pytest.param("dp=2,fsdp=2", 4, marks=pytest.mark.heavy),
    ],
)
def test_a_sharded_rank_that_computes_longer_is_named(tmp_path: Path, parallelism: str, nproc: int) -> None:
    settings = {"parallelism": parallelism, "batch_size": 4}
    ran = run(make_job(tmp_path, settings, nproc=nproc, extern=extern_of(tmp_path, SLOW_RANK)), tmp_path)
    found = times(ran)
    assert found is not None, ran.output
    fast, slow, *others = found.ranks
    assert all(slow.own_ms - other.own_ms > 100 for other in (fast, *others)), "150 ms, less what a load may cost"
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


def rank(number: int, host: str, own_ms: float, data_wait_ms: float = 1.0) -> RankTime:
    return RankTime(rank=number, host=host, step_ms=100.0, data_wait_ms=data_wait_ms, own_ms=own_ms, wait_ms=0.0)


def test_a_rank_that_costs_less_than_2_percent_is_not_named() -> None:
    assert find_straggler((rank(0, "a", 80.0), rank(1, "b", 81.9))) is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            (rank(0, "a", 80.0), rank(1, "a", 80.0), rank(2, "b", 80.0), rank(3, "b", 90.0)),
            "rank 3 on host b takes longer to compute than the others, which costs them 10\u202f% of each step",
        ),
        (
            (rank(0, "a", 80.0), rank(1, "a", 80.0), rank(2, "b", 89.0), rank(3, "b", 90.0)),
            "host b (all of its ranks; the slowest is rank 3) takes longer to compute than the others",
        ),
        (
            (rank(0, "a", 80.0, 21.0), rank(1, "b", 80.0)),
            "rank 0 on host a waits longer for its data than the others, which costs them 20\u202f% of each step",
        ),
    ],
)
def test_the_rank_or_the_host_is_named_with_what_takes_it_longer(ranks: tuple[RankTime, ...], text: str) -> None:
    straggler = find_straggler(ranks)
    assert straggler is not None
    assert text in describe(straggler)
