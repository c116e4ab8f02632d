"""Low-rank adaptation, and the packed rows of SAMSum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from accelmark.cases.llama2_7b_finetune.pytorch import dialogues
from accelmark.frameworks.pytorch.model.linear import LowRank, adapt
from accelmark.tasks.language.pytorch_decoder import packed_rows
from accelmark.tasks.text.pytorch import read_tokenizer


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
