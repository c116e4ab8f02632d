from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from accelmark.datasets.spec import dataset_specs
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import load_case
from accelmark.tasks.language.data import CLS, MASK, SEP, MaskedWindows, TokenShards
from accelmark.tasks.metrics import IGNORED
from tests.cases import tiny_data
from tests.cases.flops import published_flops
from tests.cases.job_of import job_of, losses_of, run, trained, value_of
from tests.cases.test_definitions import SMALL, case_of

RESNET = {f"model.stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)} | {
    "model.image_size": 32,
    "model.num_classes": 2,
    "batch_size": 4,
    "eval_batch_size": 3,
    "threads": 1,
    "loader.num_workers": 1,
    "end.max_epochs": 1,
    "evaluate.every_epochs": 1,
    "checkpoint.every_steps": None,
    "schedule.warmup_ratio": 0.5,
}
LLAMA = {
    **SMALL["llama2_7b"],
    "model.seq_length": 16,
    "batch_size": 2,
    "threads": 1,
    "schedule.warmup_steps": 2,
    "end.max_steps": 6,
    "loader.num_workers": 0,
    "optimizer.lr": 1e-2,
}
BERT = {
    **{f"model.{name}": size for name, size in (("vocab_size", 1100), ("hidden_size", 32), ("intermediate_size", 48))},
    **{f"model.{name}": size for name, size in (("num_layers", 2), ("num_heads", 4), ("max_predictions", 12))},
    "model.seq_length": 64,
    "model.max_positions": 64,
    "batch_size": 4,
    "eval_batch_size": 4,
    "threads": 1,
    "end.max_samples": 24,
    "evaluate.every_steps": 3,
    "checkpoint.every_steps": None,
    "loader.num_workers": 0,
}


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    return tiny_data.imagenet(tmp_path)["imagenet"]


def test_resnet50_trains_and_evaluates_on_images_in_folders(tmp_path: Path, imagenet: Path) -> None:
    over = {**RESNET, "log_every_steps": 1}
    events = run(job_of("resnet50", tmp_path / "run", {"imagenet": imagenet}, over))
    finished = value_of(events, Event.FINISHED)
    assert finished["state"] == "completed"
    assert finished["num_trained_samples"] == 16
    assert set(finished["final_metrics"]) == {"top1", "top5", "eval_loss"}
    assert finished["final_metrics"]["top5"] == 1.0
    assert finished["flops_per_sample"] == published_flops("resnet50", case_of("resnet50", over).settings.model)
    assert all(map(math.isfinite, losses_of(events)))
    rates = [value["learning_rate"] for name, value in events if name == Event.STEP_END]
    assert max(rates) == pytest.approx(0.1 * 4 / 256), "the rate follows the global batch"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tiny_data.tokens("tokens")(tmp_path)["tokens"]


def test_llama_learns_from_token_shards(tmp_path: Path, tokens: Path) -> None:
    over = {**LLAMA, "parallelism": "ddp"}
    finished, losses = trained("llama2_7b", tmp_path, {"llama_tokens": tokens}, over)
    assert losses[0] == pytest.approx(math.log(100), rel=0.1), "random weights know nothing"
    assert losses[-1] < losses[0] - 0.5
    assert finished["converged"] is None, "there is no reference curve to hold it against"
    assert finished["final_metrics"]["perplexity"] == pytest.approx(math.exp(finished["final_metrics"]["eval_loss"]))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["llama2_7b", "gpt3_6_7b", "mixtral_8x7b", "gpt_oss_20b", "deepseek_v3", "qwen1_5_moe"]
)
def test_a_sharded_decoder_trains_as_one_rank_does(tmp_path: Path, tokens: Path, name: str) -> None:
    """GPT-3's output layer is its embedding; DeepSeek-V3's router has buffers; experts are sharded."""
    case = load_case(name)
    directories = {spec.name: tokens for spec in dataset_specs(case.data, name) if spec.tree[0].path == "train"}
    assert case.train is not None
    same = {**SMALL[name], "model.seq_length": 16, "precision": "fp32", "threads": 1, "loader.num_workers": 0}
    same |= {"gradient_clip_norm": None, "gradient_accumulation_steps": 1, "end.max_steps": 6, "end.at_target": False}
    same |= {"evaluate.every_steps": None, "optimizer.lr": 1e-2, "schedule.warmup_steps": 2}
    if "eval_samples" in case.train.settings["model"]:
        same["model.eval_samples"] = 20
    if "router_aux_loss_coef" in case.train.settings["model"]:
        same["model.router_aux_loss_coef"] = 0.0  # experts are balanced over the tokens of a rank, not of all
    two = run(job_of(name, tmp_path / "two", directories, {**same, "batch_size": 1}), num_ranks=2)
    one = run(job_of(name, tmp_path / "one", directories, {**same, "batch_size": 2, "parallelism": "ddp"}))
    evaluated = [value_of(events, Event.FINISHED)["final_metrics"]["eval_loss"] for events in (one, two)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-3)
    assert losses_of(one)[-1] < losses_of(one)[0] - 0.5


def test_synthetic_data_needs_neither_directory_nor_checkpoint(tmp_path: Path) -> None:
    short = {**BERT, "loader.synthetic": True, "end.max_samples": None, "end.max_steps": 2}
    events = run(job_of("bert", tmp_path / "run", {}, short))
    finished = value_of(events, Event.FINISHED)
    assert (finished["state"], finished["converged"], finished["global_steps"]) == ("completed", None, 2)
    assert Event.EVALUATE not in {event for event, _ in events}


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
