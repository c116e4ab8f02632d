"""Low-rank adaptation, and the packed rows of SAMSum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from accelmark.cases.llama2_7b_finetune.pytorch import dialogues
from accelmark.frameworks.pytorch.model.linear import LowRank, adapt
from accelmark.spec.log.events import Event
from accelmark.tasks.language.pytorch_decoder import CausalLm, packed_rows
from accelmark.tasks.text.pytorch import read_tokenizer
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_definitions import SMALL, case_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(6, 4), nn.Linear(6, 2), nn.Linear(4, 6)


def test_adapted_layers_start_unchanged_and_only_their_changes_are_trained() -> None:
    block = Block()
    model = nn.Sequential(block, Block())
    x = torch.randn(3, 6)
    expected = block.q(x)
    adapt(model, (("q", "k"), ("o",)), rank=2, alpha=8, dropout=0.0)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == [
        f"{index}.{name}.weight" for index in (0, 1) for name in ("q.down", "q.up", "k.up", "o.down", "o.up")
    ]
    layer, other = block.get_submodule("q"), block.get_submodule("k")
    assert isinstance(layer, LowRank)
    torch.testing.assert_close(layer(x), expected)
    nn.init.ones_(layer.up.weight)
    change = 8 / 2 * layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(x), expected + x @ change.T)
    assert isinstance(other, LowRank)
    assert other.down is layer.down


def small(name: str) -> dict[str, Any]:
    over: dict[str, Any] = {
        **SMALL[name],
        "model.seq_length": 15,
        "precision": "fp32",
        "threads": 1,
        "loader.num_workers": 0,
    }
    over |= {"loader.num_workers": 0}
    over |= {"batch_size": 2, "end.max_steps": 8, "optimizer.lr": 1e-2, "log_every_steps": 4, "parallelism": "ddp"}
    return over | {"model.lora_dropout": 0.0, "checkpoint.every_steps": None}


def test_lora_trains_from_a_checkpoint_and_leaves_its_weights_alone(tmp_path: Path) -> None:
    name = "llama2_70b_lora"
    over = small(name) | {"end.at_target": False, "evaluate.every_steps": None}
    pretrained = case_of(name, over)
    config = pretrained.config()  # type: ignore[attr-defined]
    CausalLm.initialized(config, 3).net.save_pretrained(tmp_path / "weights" / "hf")
    for split in ("train", "val"):
        (tmp_path / "tokens" / split).mkdir(parents=True)
        np.save(tmp_path / "tokens" / split / "tokens.npy", (np.arange(16 * 20) % 10).astype(np.uint16))
    directories = {"gov_report": tmp_path / "tokens", "llama2_70b_weights": tmp_path / "weights"}
    events = run(job_of(name, tmp_path / "run", directories, over))
    losses = losses_of(events)
    assert losses[-1] < losses[0] - 0.05
    assert value_of(events, Event.FINISHED)["final_metrics"]["eval_loss"] < losses[0]


@pytest.fixture
def samsum(tmp_path: Path) -> tuple[Path, Path]:
    words = ["[UNK]", "Summarize", "this", "dialog", ":", "---", "Summary", "a", "b", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    entries = [{"id": str(index), "dialogue": "a " * index, "summary": "b"} for index in range(1, 6)]
    (tmp_path / "train.json").write_text(json.dumps(entries), encoding="utf-8")
    return tmp_path / "train.json", tmp_path / "tokenizer.json"


def test_dialogues_are_packed_into_rows_without_padding(samsum: tuple[Path, Path]) -> None:
    file, tokenizer = samsum[0], read_tokenizer(samsum[1], 10)
    rows = packed_rows(dialogues(file), tokenizer, 10, file)
    assert rows.shape[1] == 10
    assert rows.dtype == torch.int32
    flat = rows.flatten().tolist()
    assert flat.count(9) in {4, 5}, "each of the dialogues but perhaps the last ends with the end token"
    assert flat[:10] == packed_rows(dialogues(file), tokenizer, 4, file).flatten().tolist()[:10]
