"""A small Transformer that translates the names of languages in PyTorch."""

from __future__ import annotations

import gettext
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from accelmark.spec.errors import DataError, raising
from accelmark.tasks.metrics import ErrorRate
from accelmark.tasks.text.pytorch import Translation

CATALOGUE: Final = "uk/LC_MESSAGES/iso639-3.mo"
_HELD_OUT: Final = 8
"""One of this many names is held out."""
_SPECIAL: Final = ("<pad>", "<end>", "<unknown>")


class Names(list[tuple[str, str]]):
    """Pairs of a name in both languages, sorted; see :class:`accelmark.tasks.text.pytorch.Records`."""

    def row(self, index: int) -> tuple[str, ...]:
        """Return the English and the Ukrainian name."""
        return self[index]


def read_names(directory: Path, most_characters: int) -> list[tuple[str, str]]:
    """Return the names of at most ``most_characters`` characters in both languages, sorted.

    Names with a comma or parentheses are left out: most of them repeat another name in other words.
    """
    path = directory / CATALOGUE
    with raising(DataError, f"{path}: is not a catalogue of gettext", OSError, ValueError), path.open("rb") as file:
        translations = gettext.GNUTranslations(file)
    catalogue: dict[object, str] = translations._catalog  # type: ignore[attr-defined] # gettext has no public list of entries
    names = [(name, text) for name, text in catalogue.items() if isinstance(name, str) and name and text]
    return sorted(
        (name, text)
        for name, text in names
        if max(len(name), len(text)) <= most_characters and not set(name + text) & set(",()")
    )


def split_names(names: Iterable[tuple[str, str]], *, held_out: bool) -> Names:
    """Return every eighth name by the SHA-256 of its English form, or the others."""
    chosen = ((hashlib.sha256(pair[0].encode()).digest()[0] % _HELD_OUT == 0, pair) for pair in names)
    return Names(pair for is_held_out, pair in chosen if is_held_out == held_out)


def characters(names: Iterable[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer with a token for each character of the names; token 0 pads, token 1 ends a name."""
    letters = sorted({letter for pair in names for name in pair for letter in name})
    tokenizer = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate([*_SPECIAL, *letters])}, unk_token=_SPECIAL[2])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


class Case(Translation):
    """English to Ukrainian, character by character, from random weights; greedy translations are scored."""

    samples = "iso_codes"
    score = ErrorRate("character")
    dropout = 0.1

    def pairs(self, *, train: bool) -> Names:
        return split_names(self._names(), held_out=not train)

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a token for each character."""
        return characters(self._names())

    def _names(self) -> list[tuple[str, str]]:
        return read_names(self.data_dirs[self.samples], self.number("target_length") - 1)
