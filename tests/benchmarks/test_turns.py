from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.turns import Cost, Turns


def test_loops_take_turns_and_do_nothing_in_between() -> None:
    seen: list[str] = []

    def loop(name: str) -> Any:
        def train(batches: Iterator[str]) -> None:
            seen.extend(f"{name}{batch}" for batch in batches)

        return train

    turns = Turns({"a": loop("a"), "b": loop("b")}, "!")
    turns.run("a", 2)
    turns.run("b", 1)
    turns.run("a", 1)
    turns.close()
    assert seen == ["a!", "a!", "b!", "a!"]


def test_a_loop_that_ends_by_itself_is_recorded() -> None:
    turns = Turns({"once": lambda batches: next(batches)}, 0)
    with pytest.raises(RuntimeError, match="'once' ended"):
        turns.run("once", 2)


def test_a_cost_of_two_microseconds_is_found_in_noise_and_none_where_there_is_none() -> None:
    draw = random.Random(7)
    drift = [100 + draw.gauss(0, 20) for _ in range(400)]
    bare, same, dearer = (
        {number: one + extra + draw.gauss(0, 1) for number, one in enumerate(drift)} for extra in (0, 0, 2)
    )
    low, high = Cost.of(bare, same).extra_us_interval
    assert low < 0 < high
    assert high - low < 0.5
    cost = Cost.of(bare, dearer)
    assert cost.extra_us_interval[0] < 2 < cost.extra_us_interval[1]
    assert cost.relative == pytest.approx(0.02, rel=0.2)
