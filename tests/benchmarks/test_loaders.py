"""The loops that the benchmark of loaders compares read the same images."""

from __future__ import annotations

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
