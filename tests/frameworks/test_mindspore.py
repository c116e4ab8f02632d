"""MindSpore computes the steps and evaluations of cases as graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cases.test_mini import write_idx
from tests.frameworks.rank_jobs import SMALL_LLAMA, rank_job, run_job, values, write_plays

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

SMALL_RESNET = {
    "batch_size": 16, "eval_batch_size": 10, "end.max_epochs": 1, "precision": "fp32", "threads": 1,
    "log_every_steps": 2,
}  # fmt: skip


def test_llama_mini_is_captured(tmp_path: Path) -> None:
    (tmp_path / "plays").mkdir()
    plays = write_plays(tmp_path / "plays")
    job = rank_job("mindspore", tmp_path / "j", "llama_mini", {"shakespeare": plays}, SMALL_LLAMA)
    expect_capture(job)


def test_resnet_mini_is_captured(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for prefix, count in (("train", 64), ("t10k", 20)):
        images = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images, packed=False)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10, packed=False)
    job = rank_job("mindspore", tmp_path / "j", "resnet_mini", {"fashion_mnist": tmp_path}, SMALL_RESNET)
    expect_capture(job)


def expect_capture(job: Path) -> None:
    """Where capture fails, MindSpore computes the right numbers slowly, and says so only in its log."""
    events = run_job(job)
    assert values(events, "FINISHED")[0]["state"] == "completed"
    assert values(events, "EVALUATE")
    assert "JitCompileWithTry" not in (job.parent / "rank0.out.log").read_text(encoding="utf-8")
