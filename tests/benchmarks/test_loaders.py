"""The loops that the benchmark of loaders compares read the same images."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import loaders


def test_all_loaders_and_the_plain_loop_read_every_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCH", 2)
    assert 80_000 < loaders.write(tmp_path, 6) < 150_000, "bytes, as of a photograph"
    rows = loaders.measure(tmp_path, 1)
    assert [row.loader for row in rows] == [loaders.PLAIN, *loaders.loaders(tmp_path)]
    assert all(read() == 6 for read in (loaders.plain(tmp_path / "folders/train"), *loaders.loaders(tmp_path).values()))
    assert all(row.per_second > 0 and row.core_ratio[1] <= row.core_ratio[2] for row in rows)
    assert loaders.table(rows).count("\n") == 1 + len(rows)
