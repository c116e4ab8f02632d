"""The benchmarks of many simulated hosts, of loaders, and of the cost of the loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loaders
from benchmarks.fanout.simulated import measure
from benchmarks.turns import Cost, Turns


def test_simulated_hosts_are_checked_started_and_followed() -> None:
    (row,) = measure([2])
    assert row["phases"].keys() == {"preflight", "launch", "collection"}
    (row,) = measure([2], (1, 2))
    assert row["sent_bytes"] > row["new_bytes"] > 0


def test_all_loaders_and_the_plain_loop_read_every_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCH", 2)
    assert 80_000 < loaders.write(tmp_path, 6) < 150_000, "bytes, as of a photograph"
    rows = loaders.measure(tmp_path, 1)
    found = loaders.loaders(tmp_path)
    assert [row.loader for row in rows] == list(found)
    assert all(sum(read()) == 6 for read in (loaders.plain(tmp_path / "folders/train"), *found.values()))
    assert all(row.per_second > 0 and row.core_ratio[1] <= row.core_ratio[2] for row in rows)
    assert loaders.table(rows).count("\n") == 1 + len(rows)


def test_the_parts_of_the_way_of_a_batch_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCH", 8)
    found = loaders.parts()
    assert len(found) == 5
    assert all(value > 0 for value in found.values())


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
