from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accelmark.tasks.language.data import CLS, MASK, SEP, MaskedWindows, TokenShards
from accelmark.tasks.metrics import IGNORED


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train/a.npy", np.random.default_rng(0).integers(1000, 2000, 510 * 40, dtype=np.uint16))
    return TokenShards(tmp_path, "train", 510, 510, 2000)


def test_labels_are_the_original_tokens_at_masked_positions(shards: TokenShards) -> None:
    windows = MaskedWindows(shards, 76, 2000)
    for index in range(len(windows)):
        sample = windows.read(index, np.random.default_rng(index))
        assert sample["tokens"].shape == (512,)
        assert sample["positions"].shape == sample["labels"].shape == (76,)
        assert (int(sample["tokens"][0]), int(sample["tokens"][-1])) == (CLS, SEP)
        restored = sample["tokens"].copy()
        restored[sample["positions"]] = sample["labels"]
        assert np.array_equal(restored[1:-1], shards.window(index))
        assert len(set(sample["positions"].tolist())) == 76


def test_masking_follows_80_10_10(shards: TokenShards) -> None:
    windows = MaskedWindows(shards, 76, 2000)
    masked = kept = total = 0
    for index in range(len(windows)):
        sample = windows.read(index, np.random.default_rng((5, index)))
        now = sample["tokens"][sample["positions"]]
        masked += int((now == MASK).sum())
        kept += int((now == sample["labels"]).sum())
        total += 76
    assert abs(masked / total - 0.8) < 0.03
    assert abs(kept / total - 0.1) < 0.03


def test_fewer_positions_than_the_limit_are_filled_up_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train/a.npy", np.array([1000] * 30 + [SEP] * 2, np.uint16))
    sample = MaskedWindows(TokenShards(tmp_path, "train", 32, 32, 2000), 10, 2000).read(0, np.random.default_rng(0))
    assert (sample["labels"] != IGNORED).sum() == 5
    assert sample["labels"][5:].tolist() == [IGNORED] * 5
    assert SEP not in sample["labels"].tolist()
