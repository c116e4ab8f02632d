"""A slow rank is found by where the time of all ranks went, in a run of real processes."""

from pathlib import Path

import pytest

from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import find_straggler, straggler_text, times_of_ranks
from accelmark.results.schema import RankTime
from tests.train.jobs import make_job, run
from tests.train.test_ranks import extern_of

SLOW_RANK = """
    def backward(self, loss, scaler):
        if self.place.rank == 1:
            import time
            time.sleep(0.15)
        super().backward(loss, scaler)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("parallelism", "nproc", "num_passes"), [("ddp", 2, 2), ("fsdp2", 2, 1), ("dp=2", 2, 1), ("dp=2,fsdp=2", 4, 1)]
)
def test_a_rank_that_computes_longer_is_named_and_the_others_wait_for_it(
    tmp_path: Path, parallelism: str, nproc: int, num_passes: int
) -> None:
    settings = {"parallelism": parallelism, "gradient_accumulation_steps": num_passes, "batch_size": 4}
    ran = run(make_job(tmp_path, settings, nproc=nproc, extern=extern_of(tmp_path, SLOW_RANK)), tmp_path)
    node = NodeDir(ran.node_dir, "n1", 0, None, None)
    timeline = read_timeline(node.rank_logs())
    assert timeline is not None, ran.output
    found = times_of_ranks(timeline, [node])
    assert found is not None, ran.output
    fast, slow, *others = found.ranks
    lost_ms = 100 * num_passes  # passes of 150 ms, less what a load may cost
    assert all(slow.own_ms - other.own_ms > lost_ms for other in (fast, *others))
    assert parallelism != "ddp" or fast.wait_ms > lost_ms
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


def rank(number: int, host: str, own_ms: float, data_wait_ms: float = 1.0, longest_s: float = 0.1) -> RankTime:
    return RankTime(
        rank=number, host=host, step_ms=100.0, data_wait_ms=data_wait_ms, own_ms=own_ms, wait_ms=0.0,
        longest_s=longest_s, num_steps=690,
    )  # fmt: skip


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
        (
            (rank(0, "a", 80.0), rank(1, "b", 138.0, longest_s=40.0)),
            "rank 1 on host b paused in one step, for 40 s; the others waited for it",
        ),
    ],
)
def test_the_rank_or_the_host_is_named_with_what_takes_it_longer(ranks: tuple[RankTime, ...], text: str) -> None:
    straggler = find_straggler(ranks)
    assert straggler is not None
    assert text in straggler_text(straggler)
