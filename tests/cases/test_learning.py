"""Every standard case learns at reduced size from tiny data in the real layout, on two ranks, and resumes.

Losses are compared with those of the initial weights on the same batches: batches of four samples, which are augmented,
differ by more than a model learns in some steps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelmark.datasets.spec import dataset_specs
from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.spec.errors import EXIT_CANCELLED
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import load_case
from accelmark.tasks.conversation.pytorch import InstructionTuning
from accelmark.tasks.language.data import CLS, MASK, SEP, MaskedWindows, TokenShards
from accelmark.tasks.language.pytorch_decoder import CausalLm, Pretraining
from accelmark.tasks.metrics import IGNORED
from tests.cases import tiny_data
from tests.cases.flops import published_flops
from tests.cases.job_of import events_of, job_of, losses_of, run, trained, value_of
from tests.cases.test_definitions import NEEDS, SMALL, case_of

Writer = Callable[[Path], Mapping[str, Path]]
IMAGES: Mapping[str, Any] = {"model.image_size": 32, "model.num_classes": 2, "model.lr_batch_size": 8}
UNMIXED: Mapping[str, Any] = {"model.mixup_alpha": 0.0, "model.cutmix_alpha": 0.0, "model.erase_probability": 0.0}
SHORT = {"optimizer.lr": 1e-2, "model.seq_length": 15, "gradient_accumulation_steps": 1, "end.at_target": False}
CASES: Mapping[str, tuple[Writer, Mapping[str, Any]]] = {
    "mobilenetv2": (tiny_data.imagenet, {**IMAGES, "optimizer.lr": 2e-3}),
    "efficientnet": (tiny_data.imagenet, {**IMAGES, "optimizer.lr": 0.01}),
    "vit": (tiny_data.imagenet, {**IMAGES, "optimizer.lr": 3e-3}),
    "swin": (tiny_data.imagenet, {**IMAGES, **UNMIXED, "optimizer.lr": 1e-3, "model.image_size": 224, "batch_size": 2}),
    "distilbert": (tiny_data.sst2, {"optimizer.lr": 5e-3, "model.vocab_size": 100}),
    "gpt2": (tiny_data.lambada, {"optimizer.lr": 1e-2, "model.seq_length": 16, "model.eval_length": 16}),
    "t5_small": (tiny_data.cnn_dailymail, {"optimizer.lr": 1e-2}),
    "transformer": (tiny_data.wmt14, {"optimizer.lr": 1e-2}),
    "wav2vec2": (tiny_data.librispeech, {"optimizer.lr": 1e-2, "model.eval_seconds": 1.0}),
    "whisper_small": (tiny_data.librispeech, {"optimizer.lr": 1e-2, "model.target_length": 16, "batch_size": 2}),
    "stable_diffusion": (tiny_data.latents, {"optimizer.lr": 1e-4}),
    "flux": (tiny_data.flux_encodings, {"optimizer.lr": 1e-3}),
    "dlrm_dcnv2": (tiny_data.criteo, {"optimizer.lr": 0.1}),
    "llava1_5_7b": (
        tiny_data.llava,
        {"optimizer.lr": 3e-3, "model.eval_samples": 2, "model.vocab_size": 400, "model.seq_length": 180},
    ),
    "rgat": (tiny_data.igbh, {"optimizer.lr": 1e-2, "model.num_classes": 2}),
    "detr": (tiny_data.coco, {"optimizer.lr": 3e-3, "gradient_clip_norm": 1.0, "model.num_classes": 4}),
    "rt_detr": (tiny_data.coco, {"optimizer.lr": 1e-3, "model.num_classes": 2}),
    "segformer": (tiny_data.ade20k, {"optimizer.lr": 1e-3, "model.num_classes": 2}),
    "mask2former": (tiny_data.ade20k, {"optimizer.lr": 1e-3, "model.num_classes": 2}),
    "bert": (
        tiny_data.tokens("bert_tokens", 1000),
        {
            "optimizer.lr": 1e-2,
            "end.max_samples": None,
            "model.vocab_size": 1100,
            "model.seq_length": 18,
            "model.max_positions": 18,
            "model.max_predictions": 4,
        },
    ),
    "glm": (tiny_data.record, {"optimizer.lr": 1e-2}),
    "cpm": (tiny_data.dialogues, {"optimizer.lr": 1e-2}),
    "llama2_7b": (tiny_data.tokens("llama_tokens"), SHORT),
    "gpt3_6_7b": (tiny_data.tokens("gpt_tokens"), SHORT),
    "mixtral_8x7b": (tiny_data.tokens("mistral_tokens"), SHORT),
    "qwen1_5_moe": (tiny_data.tokens("qwen_tokens"), SHORT),
    "llama3_1_8b": (tiny_data.tokens("c4_llama3", indexed=True), {**SHORT, "model.eval_samples": 8}),
    "gpt_oss_20b": (tiny_data.tokens("c4_llama3", indexed=True), {**SHORT, "model.eval_samples": 8}),
    "deepseek_v3": (tiny_data.tokens("c4_llama3", indexed=True), {**SHORT, "model.eval_samples": 8}),
    "llama2_7b_finetune": (tiny_data.samsum, {**SHORT, "model.vocab_size": 400}),
    "llama2_70b_lora": (tiny_data.tokens("gov_report"), SHORT),
}
"""Case -> its data, and settings in addition to its reduced size and to those of all. A new standard case adds a row.

Left out, since another case has their code and data layout: ``aquila_7b``, ``aquila2_7b``, ``llama3_70b``.
"""
STEPS = 24
CHECKPOINT = 16


def with_checkpoint(case: TrainCase, weights: str | None, data: Mapping[str, Path]) -> None:
    """Put random weights where the published checkpoint belongs."""
    if "bert_tokens" in data:
        pretrained: Any = case.build_model()
        pretrained.net.save_pretrained(data["bert_tokens"] / "initial")
    if {"glm_record", "cpm_dialogues"} & data.keys():
        start_net: Any = case.build_model()
        folder = data.get("glm_record", Path()) / "blocklm-large-blank/200000"
        path = folder / "mp_rank_00_model_states.pt"
        if "cpm_dialogues" in data:
            path = data["cpm_dialogues"] / "initial/cpm_model_states_medium.pt"
        path.parent.mkdir(parents=True)
        blocks = getattr(start_net, "blocks", None)
        torch.save({"module": tiny_data.megatron_gpt2(start_net.net, block_positions=blocks)}, path)
        return
    if weights is None or weights not in data:
        return
    if isinstance(case, Pretraining):  # whose model may have low-rank changes, which a checkpoint has not
        CausalLm.initialized(case.config(), seed=3).net.save_pretrained(data[weights] / "hf")
        return
    model: Any = case.build_model()
    if isinstance(case, InstructionTuning):
        tiny_data.save_llava_parts(model.net, data[weights])
        return
    start: Any = getattr(case, "backbone", lambda net: getattr(model, "text_encoder", net))
    folder = data[weights] / "hf"
    folder.mkdir(parents=True, exist_ok=True)
    start(model.net).save_pretrained(folder)


def prepared(name: str, root: Path) -> tuple[dict[str, Any], Mapping[str, Path]]:
    """Write a case's data below ``root``; return the settings of its job and the directories."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    writer, own = CASES[name]
    over = {
        **{"precision": "fp32", "batch_size": 4, "eval_batch_size": 2, "threads": 1, "loader.num_workers": 0},
        **{"end.max_epochs": None, "end.max_steps": STEPS, "evaluate.every_epochs": None, "evaluate.every_steps": None},
        **{"checkpoint.every_steps": CHECKPOINT, "checkpoint.keep": 2, "schedule.name": "constant"},
        **{"schedule.warmup_steps": 0, "schedule.warmup_ratio": 0.0},
        **SMALL[name],
        **own,
    }
    case = case_of(name, over)
    data = tiny_data.with_weights(writer(root), name, root)
    with_checkpoint(case, getattr(case, "weights", None), data)
    return over, data


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_standard_case_learns_on_two_ranks_and_resumes(tmp_path: Path, name: str) -> None:
    over, data = prepared(name, tmp_path)
    events = run(job_of(name, tmp_path / "run", data, over), num_ranks=2)
    losses, finished = losses_of(events), value_of(events, Event.FINISHED)
    assert finished["state"] == "completed"
    assert len(losses) == STEPS
    unchanged = losses_of(run(job_of(name, tmp_path / "unchanged", data, {**over, "optimizer.lr": 1e-30}), num_ranks=2))
    assert sum(losses[-8:]) < 0.95 * sum(unchanged[-8:]), (losses, unchanged)
    assert finished["final_metrics"]
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step*"))
    assert len(kept) == 2, list((tmp_path / "run").rglob("*"))[:40]
    shutil.rmtree(kept[-1])
    (tmp_path / "run" / "rank0.out.log").unlink()
    again = run(job_of(name, tmp_path / "run", data, over, resume=True), num_ranks=2)
    assert losses_of(again) == losses[CHECKPOINT:]
    assert value_of(again, Event.FINISHED)["final_metrics"] == finished["final_metrics"]


@pytest.mark.heavy
def test_a_run_and_its_resumption_take_the_steps_of_forked_ranks(tmp_path: Path) -> None:
    """By the command; the other tests of this folder fork the ranks."""
    name = "distilbert"
    over, data = prepared(name, tmp_path)
    over |= {"end.max_steps": 300, "checkpoint.every_steps": 5}
    forked = run(job_of(name, tmp_path / "forked", data, over), num_ranks=2)
    out = tmp_path / "out"
    sets = [part for key, value in over.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = ["train", f"{name}:pytorch:CPU:1:2", "--vendor", "cpu", "--open", "--data", str(tmp_path), *sets]
    with accelmark(*command, "--out", str(out)) as process:
        while not list(out.glob("*/round1/checkpoints/step?????????")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=100)
    assert process.returncode == EXIT_CANCELLED, shown
    with accelmark("resume", str(out)) as process:
        shown, _ = process.communicate(timeout=300)
    (log,) = out.glob("*/round1/*_noderank0/rank0.out.log")
    (before,) = out.glob("*/round1/attempt1/*_noderank0/rank0.out.log")
    assert value_of(events_of(log), Event.FINISHED)["state"] == "completed", shown
    expected, first, again = losses_of(forked), losses_of(events_of(before)), losses_of(events_of(log))
    assert 0 < len(again) < len(expected)
    assert first == expected[: len(first)]
    assert again == expected[-len(again) :]
    metrics = [value_of(events, Event.FINISHED)["final_metrics"] for events in (forked, events_of(log))]
    assert metrics[1] == metrics[0]


def accelmark(*arguments: str) -> subprocess.Popen[str]:
    """Start the command, and return its process."""
    return subprocess.Popen(
        [sys.executable, "-m", "accelmark", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "250"},
    )


BERT: Mapping[str, Any] = {
    **{"model.vocab_size": 1100, "model.hidden_size": 32, "model.intermediate_size": 48, "model.num_layers": 2},
    **{"model.num_heads": 4, "model.max_predictions": 12, "model.seq_length": 64, "model.max_positions": 64},
    **{"batch_size": 4, "eval_batch_size": 4, "threads": 1, "loader.num_workers": 0},
    **{"end.max_samples": 24, "evaluate.every_steps": 3, "checkpoint.every_steps": None},
}


def test_resnet50_trains_and_evaluates_on_images_in_folders(tmp_path: Path) -> None:
    over: dict[str, Any] = {f"model.stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)}
    over |= {"model.image_size": 32, "model.num_classes": 2, "batch_size": 4, "eval_batch_size": 3, "threads": 1}
    over |= {"loader.num_workers": 1, "end.max_epochs": 1, "evaluate.every_epochs": 1, "checkpoint.every_steps": None}
    over |= {"schedule.warmup_ratio": 0.5, "log_every_steps": 1}
    events = run(job_of("resnet50", tmp_path / "run", tiny_data.imagenet(tmp_path), over))
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
    over = {**SMALL["llama2_7b"], "model.seq_length": 16, "batch_size": 2, "threads": 1, "loader.num_workers": 0}
    over |= {"schedule.warmup_steps": 2, "end.max_steps": 6, "optimizer.lr": 1e-2, "parallelism": "ddp"}
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
