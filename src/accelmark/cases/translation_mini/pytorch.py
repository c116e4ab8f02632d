"""A small Transformer that translates the names of languages in PyTorch."""

from __future__ import annotations

from tokenizers import Tokenizer

from accelmark.cases.translation_mini._names import Names, characters, read_names, split_names
from accelmark.tasks.text.metrics import CharacterErrors
from accelmark.tasks.text.pytorch import Translation


class Case(Translation):
    """English to Ukrainian, character by character, from random weights; greedy translations are scored."""

    samples = "iso_codes"
    score = CharacterErrors()
    dropout = 0.1

    def pairs(self, *, train: bool) -> Names:
        """Return the names of a split."""
        return split_names(self._names(), held_out=not train)

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a token for each character."""
        return characters(self._names())

    def _names(self) -> list[tuple[str, str]]:
        return read_names(self.data_dirs[self.samples], self.number("target_length") - 1)
