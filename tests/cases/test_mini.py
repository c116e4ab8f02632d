from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional

from accelmark.cases.llama_mini._plays import HELD_OUT, read_plays, read_windows
from accelmark.cases.lora_mini.pytorch import in_capitals
from accelmark.cases.minilm_finetune.pytorch import KINDS, read_passages, split_passages
from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.tasks.text.pytorch import Encoder, EncoderConfig
from tests.cases import tiny_data
from tests.cases.flops import published_flops
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_definitions import case_of

WORDS = {"comedies": "love merry jest", "histories": "king crown war", "tragedies": "death blood grief"}


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def fashion(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Ten classes that differ in which rows are bright."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    random = np.random.default_rng(0)
    for prefix, count in (("train", 200), ("t10k", 50)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = random.integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 200
        tiny_data.write_idx(folder, prefix, images, labels, packed=request.param)
    return folder


def test_idx_files_are_read_compressed_or_not(fashion: Path) -> None:
    images, labels = read_split(fashion, "test")
    assert images.shape == (50, 1, 28, 28)
    assert images.dtype == np.uint8
    assert labels.tolist()[:11] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert all(image[0, 2 * label].mean() > 190 for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize("fashion", [False], indirect=True)
def test_resnet_mini_learns(tmp_path: Path, fashion: Path) -> None:
    over = {"batch_size": 20, "end.max_epochs": 6, "optimizer.lr": 0.05, "threads": 1, "precision": "fp32"}
    finished = value_of(run(job_of("resnet_mini", tmp_path / "run", {"fashion_mnist": fashion}, over)), Event.FINISHED)
    assert finished["end_reason"] == "max_epochs"
    assert finished["final_metrics"]["top1"] > 0.5
    assert finished["flops_per_sample"] == published_flops("resnet_mini", case_of("resnet_mini", over).settings.model)


@pytest.mark.parametrize("fashion", [False], indirect=True)
def test_flow_mini_evaluates_with_the_same_noise_and_drops_a_tenth_of_the_classes(fashion: Path) -> None:
    over = {"batch_size": 200, "eval_batch_size": 50, "model.eval_images": 40, "loader.synthetic": False}
    case = case_of("flow_mini", over)
    case.data_dirs = {"fashion_mnist": fashion}
    (held_out,), (again,) = (list(case.eval_batches().epoch(epoch)) for epoch in (0, 1))
    assert all(torch.equal(held_out[name], again[name]) for name in held_out)
    assert held_out["latent"].shape == (40, 16, 8, 8)
    assert held_out["time"].tolist() == [index % 8 / 8 for index in range(40)]
    assert held_out["caption"].argmax(1).tolist() == [index % 10 for index in range(40)]
    pixels = functional.pixel_shuffle(held_out["latent"], 4)
    image, _ = read_split(fashion, "test")
    assert torch.allclose(pixels[0, 0, 2:30, 2:30] * STD + MEAN, torch.from_numpy(image[0, 0]).float(), atol=1e-3)
    assert torch.allclose(pixels[:, 0, :2] * STD + MEAN, torch.tensor(0.0), atol=1e-3), "the border is background"
    (batch,), (later,) = (list(case.train_batches().epoch(epoch)) for epoch in (0, 1))
    assert 5 <= int((batch["caption"].sum(1) == 0).sum()) <= 40
    assert torch.equal(batch["words"][:, 0], batch["caption"])
    assert not torch.equal(batch["noise"], later["noise"])
    assert 0 <= float(batch["time"].min()) < 0.1 < 0.9 < float(batch["time"].max()) < 1


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Plays of a few lines, in words that tell their kind."""
    folder = tmp_path / "plays"
    random = np.random.default_rng(0)
    titles = {"comedies": ["twelfth-night", "x"], "histories": ["richard-ii", "y"], "tragedies": ["macbeth", "z"]}
    for kind, names in titles.items():
        (folder / kind).mkdir(parents=True)
        for name in names:
            lines = [f"# {name}"]
            for act in ("I", "II", "III", "IV", "V"):
                lines += [f"## ACT {act}", "### Scene 1", "_Enter all._", "**ALL**"]
                lines += [" ".join(random.choice(WORDS[kind].split(), 6)) for _ in range(20)]
            (folder / kind / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_held_out_plays_are_whole_and_only_in_the_evaluation(plays: Path) -> None:
    parts = [read_plays(plays, held_out=held).tobytes().decode() for held in (False, True)]
    for name in HELD_OUT:
        assert f"# {name}" in parts[1]
        assert f"# {name}" not in parts[0]
    (plays / "tragedies" / "macbeth.md").unlink()
    with pytest.raises(DataError, match="macbeth not found"):
        read_plays(plays, held_out=False)


def test_llama_mini_learns(tmp_path: Path, plays: Path) -> None:
    over: dict[str, Any] = {
        "model.hidden_size": 32,
        "model.intermediate_size": 48,
        "model.num_layers": 2,
        "model.seq_length": 32,
    }
    over |= {"model.eval_windows": 32, "end.max_steps": 60, "threads": 1, "optimizer.lr": 1e-2, "precision": "fp32"}
    over |= {"batch_size": 16, "evaluate.every_steps": None}
    events = run(job_of("llama_mini", tmp_path / "run", {"shakespeare": plays}, over))
    finished, losses = value_of(events, Event.FINISHED), losses_of(events)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert finished["final_metrics"]["eval_loss"] < 3.0
    assert finished["final_metrics"]["bits_per_byte"] == pytest.approx(
        finished["final_metrics"]["eval_loss"] / math.log(2)
    )


def test_lora_mini_learns_and_changes_only_its_low_rank_matrices(tmp_path: Path, plays: Path) -> None:
    over: dict[str, Any] = {
        "model.eval_windows": 8,
        "end.max_steps": 12,
        "threads": 1,
        "batch_size": 4,
        "model.seq_length": 32,
    }
    over |= {"checkpoint.every_steps": 12, "optimizer.lr": 1e-2}
    events = run(job_of("lora_mini", tmp_path / "run", {"shakespeare": plays}, over))
    losses = losses_of(events)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3, losses
    case = case_of("lora_mini", over)
    before = case.build_model().state_dict()
    after = torch.load(tmp_path / "run/checkpoints/step000000012/weights.pt", weights_only=True)["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith((".up.weight", ".down.weight"))}
    assert sum(before[name].numel() for name in changed) == 98_304


def test_moe_mini_learns_and_spreads_tokens_over_its_experts(tmp_path: Path, plays: Path) -> None:
    over: dict[str, Any] = {
        "model.hidden_size": 32,
        "model.intermediate_size": 48,
        "model.num_layers": 2,
        "model.seq_length": 32,
        "model.eval_samples": 32,
    }
    over |= {"end.max_steps": 60, "threads": 1, "optimizer.lr": 1e-2, "checkpoint.every_steps": 60}
    events = run(job_of("moe_mini", tmp_path / "run", {"shakespeare": plays}, over))
    assert value_of(events, Event.FINISHED)["final_metrics"]["eval_loss"] < 3.0
    model = case_of("moe_mini", over).build_model()
    weights = torch.load(tmp_path / "run/checkpoints/step000000060/weights.pt", weights_only=True)["model"]
    model.load_state_dict(weights)
    tokens = torch.from_numpy(read_windows(plays, 32, 32)).long()
    with torch.no_grad():
        scores = model.get_submodule("net")(tokens, output_router_logits=True).router_logits
    for layer in scores:
        chosen = layer.topk(2).indices.flatten().bincount(minlength=8) / layer.shape[0]
        assert 0 < chosen.min() < chosen.max() < 0.9, chosen.tolist()  # collapsed, two experts would have 1.0 each


def test_capitals_replace_letters_and_nothing_else() -> None:
    text = torch.tensor(list(b"Enter MACBETH, {a} z`\xc3\xa4"), dtype=torch.uint8)
    assert bytes(in_capitals(text).tolist()) == b"ENTER MACBETH, {A} Z`\xc3\xa4"


def test_passages_hold_what_is_spoken_and_nothing_else(plays: Path) -> None:
    passages = read_passages(plays, 100)
    assert {passage.act for passage in passages} == {"I", "II", "III", "IV", "V"}
    for passage in passages:
        assert set(passage.text.split()) <= set(WORDS[KINDS[passage.kind]].split())
        assert 50 <= len(passage.text) < 150
    held_out = split_passages(passages, held_out=True)
    assert {passage.act for passage in held_out} == {"IV"}
    assert not {passage.act for passage in split_passages(passages, held_out=False)} & {"IV"}
    some = split_passages(passages, held_out=True, limit=5)
    assert len(some) == 5
    assert split_passages(list(reversed(passages)), held_out=True, limit=5) == some


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """A tiny encoder with random weights, and a tokenizer that knows the plays' words."""
    folder = tmp_path / "minilm"
    folder.mkdir()
    config = EncoderConfig(
        hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, vocab_size=16, max_positions=64
    )
    torch.manual_seed(0)
    state = Encoder(config).state_dict() | {"pooler.dense.weight": torch.zeros(32, 32)}
    save_file(state, folder / "model.safetensors")
    words = ["[PAD]", "[UNK]", *" ".join(WORDS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_minilm_finetune_learns(tmp_path: Path, plays: Path, minilm: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 16}
    over: dict[str, Any] = {
        f"model.{name}": value for name, value in {**sizes, "max_positions": 64, "passage_chars": 100}.items()
    }
    over |= {"model.seq_length": 32, "end.max_steps": 30, "threads": 1, "precision": "fp32", "optimizer.lr": 1e-3}
    events = run(job_of("minilm_finetune", tmp_path / "run", {"shakespeare": plays, "minilm": minilm}, over))
    finished = value_of(events, Event.FINISHED)
    assert finished["final_metrics"]["accuracy"] > 0.9, "one word tells the kind"
