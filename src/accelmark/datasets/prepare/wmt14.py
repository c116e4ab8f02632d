"""WMT14 English-German: parallel text, newstest2014, and a tokenizer that is trained on the text of both languages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

CORPORA: Final = {
    "training-parallel-europarl-v7.tgz": "europarl-v7.de-en",
    "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
    "training-parallel-nc-v9.tgz": "news-commentary-v9.de-en",
}
"""Archive -> name of its parallel files without the language, in the order in which they are written."""
TEST: Final = "test-full.tgz"
_TEST_FILES: Final = {"en": "newstest2014-deen-src.en.sgm", "de": "newstest2014-deen-ref.de.sgm"}
_TEST_SENTENCES: Final = 3003
_SEGMENT: Final = re.compile(r"<seg[^>]*>(.*?)</seg>", re.DOTALL)
_LANGUAGES: Final = ("en", "de")
_TOKENS: Final = 37_000


def _write_training(archives: Archives, folder: Path) -> None:
    """Append the pairs of all corpora in which both sentences have text."""
    with ExitStack() as stack:
        targets = [stack.enter_context((folder / f"text.{language}").open("wb")) for language in _LANGUAGES]
        for name, stem in CORPORA.items():
            texts = [folder / f"{stem}.{language}" for language in _LANGUAGES]
            archives.extract(name, {text.name: text for text in texts})
            for pair in _pairs(archives.paths[name], texts):
                for target, sentence in zip(targets, pair, strict=True):
                    target.write(sentence + b"\n")
            for text in texts:
                text.unlink()


def _pairs(archive: Path, texts: list[Path]) -> Iterator[tuple[bytes, bytes]]:
    with texts[0].open("rb") as english, texts[1].open("rb") as german:
        try:
            for pair in zip(english, german, strict=True):
                first, second = (b" ".join(sentence.split()) for sentence in pair)
                if first and second:
                    yield first, second
        except ValueError as error:
            names = " and ".join(text.name for text in texts)
            raise DataError(f"{archive}: {names} have different numbers of lines") from error


def _write_test(archives: Archives, folder: Path) -> None:
    """Write the sentences of newstest2014, which are segments of SGML files."""
    archives.extract(TEST, {name: folder / name for name in _TEST_FILES.values()})
    for language, name in _TEST_FILES.items():
        text = (folder / name).read_text(encoding="utf-8")
        lines = [" ".join(html.unescape(segment).split()) for segment in _SEGMENT.findall(text)]
        if len(lines) != _TEST_SENTENCES or not all(lines):
            raise DataError(f"{archives.paths[TEST]}: {name} has {len(lines)} sentences; expected {_TEST_SENTENCES}")
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / name).unlink()


def _train_tokenizer(archives: Archives, folder: Path) -> None:
    """Train the tokenizer that the case's README describes."""
    from tokenizers import SentencePieceBPETokenizer

    texts = [str(folder.parent / "train" / f"text.{language}") for language in _LANGUAGES]
    tokenizer = SentencePieceBPETokenizer()
    tokenizer.train(texts, vocab_size=_TOKENS, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))


PREPARATION: Final = Preparation(
    archives=(
        Archive("training-parallel-europarl-v7.tgz", "c52404583294a1b609e56d45b2ed06f5"),
        Archive("training-parallel-commoncrawl.tgz", "7e0acbe86b0d7816300e14650f5b2bd4"),
        Archive("training-parallel-nc-v9.tgz", "92e42b68f9d3c2ae9722e6d1c2623e21"),
        Archive(TEST, None),
    ),
    parts={
        "train": Part(tuple(CORPORA), _write_training),
        "test": Part((TEST,), _write_test),
        "tokenizer": Part((), _train_tokenizer),
    },
    requires=("accelmark[models]",),
)
