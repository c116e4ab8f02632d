"""WMT14 English-German: parallel text, newstest2014, and a tokenizer that is trained on the text of both languages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Preparation,
    copied,
    opened_tar,
    regular_files,
    whole_directory,
    write_whole,
)
from accelmark.datasets.verify import ProgressMeter
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


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``train/text.*``, ``test/text.*`` and ``tokenizer/tokenizer.json``; complete directories are kept."""
    if not (to / "train").exists():
        with whole_directory(to / "train") as part:
            _write_training(archives, part, meter)
    else:
        for name in CORPORA:
            meter.add(archives[name].stat().st_size)
    if not (to / "test").exists():
        with whole_directory(to / "test") as part:
            _write_test(archives[TEST], part)
    meter.add(archives[TEST].stat().st_size)
    if not (to / "tokenizer").exists():
        with whole_directory(to / "tokenizer") as part:
            _train_tokenizer([str(to / "train" / f"text.{language}") for language in _LANGUAGES], part)


def _write_training(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Append the pairs of all corpora in which both sentences have text."""
    with ExitStack() as stack:
        targets = [stack.enter_context((to / f"text.{language}").open("wb")) for language in _LANGUAGES]
        for name, stem in CORPORA.items():
            texts = [to / f"{stem}.{language}" for language in _LANGUAGES]
            _extract(archives[name], {text.name: text for text in texts})
            for pair in _pairs(archives[name], texts):
                for target, sentence in zip(targets, pair, strict=True):
                    target.write(sentence + b"\n")
            for text in texts:
                text.unlink()
            meter.add(archives[name].stat().st_size)


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


def _extract(path: Path, wanted: Mapping[str, Path]) -> None:
    """Write members by the last part of their names."""
    missing = set(wanted)
    with opened_tar(path) as archive:
        for name, _, stream in regular_files(archive):
            if (last := name.rpartition("/")[2]) in missing:
                write_whole(wanted[last], copied(stream))
                missing.discard(last)
            if not missing:
                return
    raise DataError(f"{path}: has no {', '.join(sorted(missing))}")


def _write_test(path: Path, to: Path) -> None:
    """Write the sentences of newstest2014, which are segments of SGML files."""
    files = {language: to / name for language, name in _TEST_FILES.items()}
    _extract(path, {file.name: file for file in files.values()})
    for language, file in files.items():
        found = [" ".join(html.unescape(text).split()) for text in _SEGMENT.findall(file.read_text(encoding="utf-8"))]
        if len(found) != _TEST_SENTENCES or not all(found):
            raise DataError(f"{path}: {file.name} has {len(found)} sentences; expected {_TEST_SENTENCES}")
        (to / f"text.{language}").write_text("\n".join(found) + "\n", encoding="utf-8")
        file.unlink()


def _train_tokenizer(texts: list[str], to: Path) -> None:
    """Train the tokenizer that the case's README describes."""
    from tokenizers import SentencePieceBPETokenizer

    tokenizer = SentencePieceBPETokenizer()
    tokenizer.train(texts, vocab_size=_TOKENS, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.save(str(to / "tokenizer.json"))


PREPARATION: Final = Preparation(
    archives=(
        Archive("training-parallel-europarl-v7.tgz", "c52404583294a1b609e56d45b2ed06f5"),
        Archive("training-parallel-commoncrawl.tgz", "7e0acbe86b0d7816300e14650f5b2bd4"),
        Archive("training-parallel-nc-v9.tgz", "92e42b68f9d3c2ae9722e6d1c2623e21"),
        Archive(TEST, None),
    ),
    unpack=_unpack,
    module="tokenizers",
    module_from="models",
)
