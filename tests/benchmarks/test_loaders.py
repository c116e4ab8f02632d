"""The loops that the benchmark of loaders compares read the same images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import loaders


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


def test_some_loaders_read_each_image_several_times_and_replace_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "BATCH", 2)
    monkeypatch.setattr(loaders, "RESULTS", tmp_path / "results.json")
    loaders.write(tmp_path, 2, 3)
    rows = loaders.measure(tmp_path, 1, "shards")
    assert [row.loader for row in rows] == ["PyTorch, shards, no worker", "PyTorch, shards, one worker process"]
    assert sum(loaders.loaders(tmp_path)[rows[0].loader]()) == 6
    for changed in (rows, [replace(rows[0], per_second=1.0)]):
        loaders.keep(changed, 6, 1.0)
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]
    assert [row["per_second"] for row in found] == [1.0, rows[1].per_second]
