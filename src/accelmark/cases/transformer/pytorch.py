"""Transformer (big) for translation from English to German in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from tokenizers import Tokenizer

from accelmark.tasks.metrics import Bleu
from accelmark.tasks.text.pytorch import Parallel, Translation, read_tokenizer


class Case(Translation):
    """English to German from random weights; beam search with the paper's numbers is scored."""

    samples = "wmt14"
    score = Bleu(lowercase=True)
    dropout = 0.3
    generation: ClassVar = {"num_beams": 4, "length_penalty": 0.6}

    def pairs(self, *, train: bool) -> Parallel:
        """Return the sentences of a split."""
        split = self.data_dirs[self.samples] / ("train" if train else "test")
        return Parallel([split / "text.en", split / "text.de"])

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of both languages."""
        return read_tokenizer(self.data_dirs[self.samples] / "tokenizer" / "tokenizer.json", self.number("vocab_size"))
