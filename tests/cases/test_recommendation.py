"""Click logs, their score, and embedding tables whose rows ranks share."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from accelmark.cases.recommendation_mini.pytorch import MadeUpClicks
from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.frameworks.pytorch.optimizers import RowAdagrad
from accelmark.results.rounds.hosts import round_of
from accelmark.spec.errors import DataError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import load_case
from accelmark.tasks.recommendation.pytorch import ClickLog, area_under_curve
from tests.cases import tiny_data
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_definitions import SMALL

ROWS, IDS = (50, 3, 20), (2, 1, 4)
OVER: Mapping[str, Any] = {
    **SMALL["dlrm_dcnv2"],
    **{"optimizer.lr": 0.1, "precision": "fp32", "eval_batch_size": 8, "threads": 1, "loader.num_workers": 0},
    **{"end.max_epochs": None, "end.max_steps": 20, "evaluate.every_steps": None},
    **{"checkpoint.every_steps": 12, "checkpoint.keep": 2},
}


def log_of(directory: Path, share: float = 1.0) -> ClickLog:
    return ClickLog(directory, 13, ROWS, IDS, share)


def test_days_are_read_in_order_and_across_their_borders(tmp_path: Path) -> None:
    folder = tiny_data.criteo(tmp_path)["criteo"] / "train"
    (folder / "day_1_dense.npy").rename(folder / "day_10_dense.npy")
    (folder / "day_1_labels.npy").rename(folder / "day_10_labels.npy")
    (folder / "day_1_sparse_multi_hot.npz").rename(folder / "day_10_sparse_multi_hot.npz")
    log = log_of(folder)
    assert len(log) == 96
    found = log.read(58, 63)
    dense = [np.load(folder / f"day_{day}_dense.npy") for day in (0, 10)]
    assert (found["dense"] == np.concatenate([dense[0][58:], dense[1][:3]])).all()
    with np.load(folder / "day_10_sparse_multi_hot.npz") as archive:
        expected = np.concatenate([archive[f"{table}.npy"][:3] for table in range(3)], 1)
    assert (found["ids"][2:] == expected).all()
    assert (found["label"] == found["ids"][:, 0] % 2).all()
    assert len(log_of(folder, 0.5)) == 60 + 18


def test_the_area_under_the_curve_counts_pairs() -> None:
    random = np.random.default_rng(0)
    scored = np.stack([random.integers(0, 9, 200), random.integers(0, 2, 200)], 1).astype(float)
    positive, negative = (scored[scored[:, 1] == label, 0][:, None] for label in (1, 0))
    pairs = (positive > negative.T).mean() + (positive == negative.T).mean() / 2
    assert area_under_curve(scored) == pytest.approx(pairs)
    with pytest.raises(DataError, match="0 clicks in 5 samples"):
        area_under_curve(np.zeros((5, 2)))


def test_the_matrix_gives_the_sums_of_every_table() -> None:
    torch.manual_seed(0)
    tables = EmbeddingTables(ROWS, IDS, 4)
    ids = torch.cat([torch.randint(rows, (6, count)) for rows, count in zip(ROWS, IDS, strict=True)], 1)
    order = (torch.arange(sum(ROWS)) * tables._stride) % sum(ROWS)
    assert sorted(order.tolist()) == list(range(sum(ROWS)))
    plain = torch.split(tables.weight.detach()[order], list(ROWS))
    parts = torch.split(ids, list(IDS), 1)
    expected = [functional.embedding_bag(part, table, mode="sum") for part, table in zip(parts, plain, strict=True)]
    assert torch.allclose(tables(ids), torch.stack(expected, 1))
    assert [float(table.abs().max()) < rows**-0.5 for table, rows in zip(plain, ROWS, strict=True)] == [True] * 3
    assert float(plain[1].abs().max()) > 0.3, "the small table has the larger values"
    tables(ids).sum().backward()
    assert tables.weight.grad is not None
    assert tables.weight.grad.is_sparse
    found = tables.weight.grad.coalesce().indices()[0]
    assert found.tolist() == sorted(set(order[ids + tables.columns].flatten().tolist()))


def test_each_part_of_the_rows_has_its_share_of_every_table() -> None:
    rows = (40_000, 300, 7_000)
    tables = EmbeddingTables(rows, (1, 1, 1), 1)
    places = (torch.arange(sum(rows)) * tables._stride) % sum(rows)
    for part in torch.split(places, list(rows)):
        shares = torch.histc(part.float(), 8, 0, sum(rows)) / len(part)
        assert shares.min() > 0.11, shares
        assert shares.max() < 0.14, shares


def test_adagrad_leaves_rows_without_gradient_alone() -> None:
    tables = EmbeddingTables(ROWS, IDS, 4)
    optimizer = RowAdagrad(tables.parameters(), lr=0.1)
    before = tables.weight.detach().clone()
    tables(torch.zeros(2, sum(IDS), dtype=torch.long)).sum().backward()
    optimizer.step()
    assert int((tables.weight.detach() != before).any(1).sum()) == 3, "row 0 of each table"


@pytest.mark.heavy
def test_ranks_that_share_rows_train_as_one_rank_does_and_change_their_number(tmp_path: Path) -> None:
    data = tiny_data.criteo(tmp_path)
    one = run(job_of("dlrm_dcnv2", tmp_path / "one", data, {**OVER, "batch_size": 6, "parallelism": "ddp"}))
    three = run(job_of("dlrm_dcnv2", tmp_path / "three", data, {**OVER, "batch_size": 2}), num_ranks=3)
    metrics = [value_of(events, Event.FINISHED)["final_metrics"] for events in (one, three)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3)
    (last,) = [path for path in (tmp_path / "three" / "checkpoints").glob("step*") if "20" in path.name]
    shutil.rmtree(last)
    (tmp_path / "three" / "rank0.out.log").unlink()
    over = {**OVER, "batch_size": 3}
    two = run(job_of("dlrm_dcnv2", tmp_path / "three", data, over, resume=True), num_ranks=2)
    assert len(losses_of(two)) == 8
    assert losses_of(two) != losses_of(three)[12:], "a rank logs the loss of its own samples"
    assert value_of(two, Event.FINISHED)["final_metrics"] == pytest.approx(metrics[0], rel=1e-3)


def made_up(count: int, seed: int) -> MadeUpClicks:
    return MadeUpClicks(count, 4, (2000, 1000, 500, 100, 50, 10), (1, 1, 3, 1, 2, 1), seed)


def test_a_made_up_log_is_the_same_in_every_run_and_clicks_follow_its_probabilities() -> None:
    log = made_up(20_000, 2)
    found = log.read(100, 103)
    assert found["ids"].tolist() == made_up(20_000, 2).read(100, 103)["ids"].tolist()
    assert found["ids"].tolist() != made_up(20_000, 1).read(100, 103)["ids"].tolist()
    whole = log.read(0, 20_000)
    assert (whole["ids"].max(0) < np.repeat([2000, 1000, 500, 100, 50, 10], [1, 1, 3, 1, 2, 1])).all()
    probability = 1 / (1 + np.exp(-log.log_odds))
    for low in (0.0, 0.2, 0.5, 0.8):
        chosen = (probability >= low) & (probability < low + 0.2)
        assert whole["label"][chosen].mean() == pytest.approx(probability[chosen].mean(), abs=0.03), low
    assert log.best_auc() == pytest.approx(0.87, abs=0.01)
    other = np.stack([log.log_odds + np.random.default_rng(0).normal(0, 1, 20_000), whole["label"]], 1)
    assert area_under_curve(other) < log.best_auc() - 0.02


def test_results_on_made_up_data_are_marked(tmp_path: Path) -> None:
    job = JobSpec.model_validate_json(job_of("recommendation_mini", tmp_path, {}, {}).read_bytes())
    marks = [
        round_of(job.model_copy(update={"work": work}), ("succeeded", None), (), (), {}, task="train", figures={}).marks
        for work in (job.work, job.work.model_copy(update={"made_up_data": True}))
    ]
    assert marks == [("open",), ("open", "made_up_data")]
    train = load_case("recommendation_mini").train
    assert train is not None
    assert train.made_up_data
