"""Prediction of a passage's last word, as in LAMBADA (Paperno et al. 2016, arXiv:1606.06031)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.data.batches import IndexedBatches
from accelmark.frameworks.pytorch.tasks.decoder import Pretraining
from accelmark.frameworks.pytorch.tasks.text import read_tokenizer
from accelmark.spec.errors import DataError
from accelmark.train.tasks.text.files import JsonLines


@final
class Passages:
    """Passages of ``length`` tokens, zeros at their end, and where the tokens of the last word are."""

    def __init__(self, path: Path, tokenizer: Tokenizer, length: int) -> None:
        self._path, self._lines = path, JsonLines(path, ["text"])
        self._tokenizer, self._length = tokenizer, length

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``tokens``, and ``is_word``, true for the tokens of the last word, both of shape (length,)."""
        context, _, word = self._lines.row(index)[0].strip().rpartition(" ")
        first, last = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in (context, f" {word}"))
        tokens = first + last
        if not first or len(tokens) > self._length:
            counts = f"{len(first)} tokens before the last word and {len(tokens)} in all"
            raise DataError(f"{self._path}:{index + 1}: has {counts}; expected at least 1 and at most {self._length}")
        spare = self._length - len(tokens)
        return {
            "tokens": torch.tensor(tokens + [0] * spare),
            "is_word": torch.tensor([False] * len(first) + [True] * len(last) + [False] * spare),
        }


class LastWord(Pretraining):
    """Training on token shards, evaluation on the last words of passages; a word is right if all its tokens are.

    ``val/*.jsonl`` has a ``text`` in each line, ``tokenizer/tokenizer.json`` is the shards' tokenizer. ``eval_length``
    under ``model`` is the longest passage in tokens.
    """

    def eval_batches(self) -> Batches:
        """Return the passages."""
        directory = self.data_dirs[self.shards] / "val"
        paths = sorted(directory.glob("*.jsonl"))
        if len(paths) != 1:
            raise DataError(f"{directory}: expected one file of passages (*.jsonl), found {len(paths)}")
        tokenizer = read_tokenizer(self.data_dirs[self.shards] / "tokenizer" / "tokenizer.json", self.vocab_size)
        source = Passages(paths[0], tokenizer, self.number("eval_length"))
        return IndexedBatches(source, self.settings.eval_batch_size, self.place, self.settings.loader, train=False)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count words of which all tokens are the likeliest, and add up the cross entropies of their tokens."""
        tokens = batch[self.tokens].long()
        logits: Tensor = model(tokens[:, :-1])
        labels = tokens[:, 1:]
        # Synthetic samples have no words: their last token is taken for one.
        is_word = (
            batch["is_word"][:, 1:] if "is_word" in batch else torch.arange(labels.shape[1]) == labels.shape[1] - 1
        )
        is_word = is_word.to(labels.device).expand_as(labels)
        wrong = ((logits.argmax(-1) != labels) & is_word).any(1)
        loss = F.cross_entropy(logits[is_word].float(), labels[is_word], reduction="sum")
        return {"wrong": wrong.sum(), "words": torch.ones_like(wrong).sum(), "loss": loss, "count": is_word.sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of right words, and the mean loss of their tokens."""
        return {"accuracy": 1 - sums["wrong"] / sums["words"], "eval_loss": sums["loss"] / sums["count"]}
