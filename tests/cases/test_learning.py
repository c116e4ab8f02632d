"""Every standard case learns at reduced size from tiny data in the real layout, on two ranks, and resumes.

Losses are compared with those of the initial weights on the same batches: batches of four samples, which are augmented,
differ by more than a model learns in some steps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.spec.errors import EXIT_CANCELLED
from accelmark.spec.log.events import Event
from accelmark.tasks.conversation.pytorch import InstructionTuning
from accelmark.tasks.language.pytorch_decoder import CausalLm, Pretraining
from tests.cases import tiny_data
from tests.cases.job_of import events_of, job_of, losses_of, run, value_of
from tests.cases.test_definitions import NEEDS, SMALL, case_of

Writer = Callable[[Path], Mapping[str, Path]]
IMAGES: Mapping[str, Any] = {"model.image_size": 32, "model.num_classes": 2, "model.lr_batch_size": 8}
UNMIXED: Mapping[str, Any] = {"model.mixup_alpha": 0.0, "model.cutmix_alpha": 0.0, "model.erase_probability": 0.0}
SHORT: Mapping[str, Any] = {
    "optimizer.lr": 1e-2,
    "model.seq_length": 15,
    "gradient_accumulation_steps": 1,
    "end.at_target": False,
}
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
        "precision": "fp32",
        "batch_size": 4,
        "eval_batch_size": 2,
        "threads": 1,
        "loader.num_workers": 0,
        "end.max_epochs": None,
        "end.max_steps": STEPS,
        "evaluate.every_epochs": None,
        "evaluate.every_steps": None,
        "checkpoint.every_steps": CHECKPOINT,
        "checkpoint.keep": 2,
        "schedule.name": "constant",
        "schedule.warmup_steps": 0,
        "schedule.warmup_ratio": 0.0,
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
