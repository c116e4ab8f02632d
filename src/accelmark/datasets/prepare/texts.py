"""Texts from their published archives: C4, CNN/DailyMail, CPM's dialogues, LAMBADA, SAMSum, SST-2, WMT14."""

from __future__ import annotations

import hashlib
import html
import json
import lzma
import re
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation, files_in, write_whole
from accelmark.datasets.shards import indexed_tokens
from accelmark.spec.errors import DataError, raising

C4_SETS: Final = {"train": "c4-train.en_6_text_document", "val": "c4-validation-91205-samples.en_text_document"}
"""Split -> indexed data set of Megatron-LM with tokens of Llama 3.1's vocabulary, as MLPerf Training publishes it."""


def _write_c4(split: str, archives: Archives, folder: Path) -> None:
    """Link or copy a set, after its size is compared with its index."""
    tokens, index = (f"{C4_SETS[split]}.{part}" for part in ("bin", "idx"))
    indexed_tokens(archives.paths[tokens], archives.paths[index])
    for name in (tokens, index):
        archives.place(name, folder)


STORIES: Final = ("cnn_stories.tgz", "dailymail_stories.tgz")
LISTS: Final = {"train": "all_train.txt", "val": "all_val.txt"}
"""Split -> list of the addresses of its articles (version 3.0.0); a story is named by the SHA-1 of its address."""
_SENTENCE_ENDS: Final = (".", "!", "?", "...", "'", "`", '"', "\u2019", "\u201d", ")")


def _write_stories(split: str, archives: Archives, folder: Path) -> None:
    """Write ``<split>.jsonl`` in the order of the archives."""
    lines = archives.paths[LISTS[split]].read_bytes().splitlines()
    left = {hashlib.sha1(line.strip(), usedforsecurity=False).hexdigest() for line in lines if line.strip()}
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for member, stream in (entry for name in STORIES for entry in archives.members(name)):
            story = member.rpartition("/")[2].removesuffix(".story")
            if story in left:
                left.remove(story)
                article, highlights = _split_story(stream.read().decode("utf-8"))
                file.write(json.dumps({"article": article, "highlights": highlights}) + "\n")
    if left:
        problem = f"lack {len(left):,} stories of {LISTS[split]}, for example {min(left)}.story"
        raise DataError(f"{' and '.join(STORIES)} in {archives.paths[STORIES[0]].parent} {problem}")


def _split_story(text: str) -> tuple[str, str]:
    """Return the article in one line, and its highlights in a line each; lines that lack a full stop get one."""
    article: list[str] = []
    highlights: list[str] = []
    target = article
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "@highlight":
            target = highlights
        else:
            target.append(line if line.endswith(_SENTENCE_ENDS) else f"{line} .")
    return " ".join(article), "\n".join(highlights)


_VOCABULARY: Final = "chinese_vocab.model"
_CPM_WEIGHTS: Final = "cpm_model_states_medium.pt"
_DIALOGUES: Final = {
    "train": Archive("train.txt", "65bdbb2b3a8d3b61dbe63ea1a67eec62"),
    "val": Archive("valid.txt", "b7d8356e0d921b512f9b6860138f2174"),
}
"""With the MD5 sums that FlagPerf's loader compares (``training/benchmarks/cpm/pytorch/dataloaders/dataloader.py``)."""
_ROW: Final = 201
_PIECES: Final = str.maketrans(" \n", "\u2582\u2583")
"""Characters of CPM's vocabulary for a space and the end of a line."""


def _write_dialogues(split: str, archives: Archives, folder: Path) -> None:
    """Write ``tokens.npy``: each line's tokens and its end, cut into rows of 201; the last row is padded."""
    import jieba
    from sentencepiece import SentencePieceProcessor

    tokenizer: Any = SentencePieceProcessor(model_file=str(archives.paths[_VOCABULARY]))
    end, pad = (tokenizer.piece_to_id(piece) for piece in ("<eod>", "<pad>"))
    tokens = array("H")
    with archives.paths[_DIALOGUES[split].name].open(encoding="utf-8") as lines:
        for line in lines:
            words = " ".join(word.translate(_PIECES) for word in jieba.cut(line))
            tokens.extend([*tokenizer.encode(words), end])
            tokens.extend([pad] * (-len(tokens) % _ROW))
    np.save(folder / "tokens.npy", np.frombuffer(tokens, np.uint16))


LAMBADA: Final = "lambada-dataset.tar.gz"
TOKENIZER: Final = "tokenizer.json"
NOVELS: Final = "train-novels.tar"
PASSAGES: Final = "lambada_test_plain_text.txt"
END: Final = "<|endoftext|>"
"""Token after each novel."""


def _write_novels(archives: Archives, folder: Path) -> None:
    """Write ``novels.bin``: the tokens of GPT-2 as little-endian uint16, with the end of a text after each novel."""
    from tokenizers import Tokenizer

    path, file = archives.paths[LAMBADA], archives.paths[TOKENIZER]
    with raising(DataError, f"{file}: is not a tokenizer", Exception):  # tokenizers raises this class itself
        tokenizer = Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id(END)
    if end is None or tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise DataError(f"{file}: is not GPT-2's: it has no token {END}, or more than 65,536 tokens")

    def tokens(novels: IO[bytes]) -> Iterator[bytes]:
        for name, _, stream in files_in(path, novels):
            if name.endswith(".txt"):
                ids = tokenizer.encode(stream.read().decode("utf-8"), add_special_tokens=False).ids
                yield np.array([*ids, end], "<u2").tobytes()

    for name, stream in archives.members(LAMBADA):
        if name.endswith(f"/{NOVELS}"):
            write_whole(folder / "novels.bin", tokens(stream))
            return
    raise DataError(f"{path}: has no {NOVELS}; download it again")


def _write_passages(archives: Archives, folder: Path) -> None:
    """Write the passages to ``test.jsonl``, a JSON object a line; a model predicts the last word of each."""
    plain = folder / PASSAGES
    archives.extract(LAMBADA, {PASSAGES: plain})
    lines = plain.read_bytes().decode("utf-8").split("\n")
    write_whole(folder / "test.jsonl", (f"{json.dumps({'text': line})}\n".encode() for line in lines if line.strip()))
    plain.unlink()


SAMSUM: Final = "corpus.7z"
SAMSUM_DIALOGUES: Final = {"train.json": 14_732, "val.json": 818, "test.json": 819}
"""File -> number of its dialogues, as in table 2 of the paper (arXiv:1911.12237)."""


def _write_samsum(archives: Archives, folder: Path) -> None:
    import py7zr

    path = archives.paths[SAMSUM]
    damage = py7zr.exceptions.ArchiveError, lzma.LZMAError, EOFError, OSError
    with raising(DataError, f"{path}: is not a readable 7z archive", *damage), py7zr.SevenZipFile(path) as archive:
        archive.extract(folder, targets=list(SAMSUM_DIALOGUES))
    for name, expected in SAMSUM_DIALOGUES.items():
        if (number := len(json.loads((folder / name).read_bytes()))) != expected:
            raise DataError(f"{path}: {name} has {number:,} dialogues instead of {expected:,}")


SST2: Final = "SST-2.zip"


def _write_sst2(archives: Archives, folder: Path) -> None:
    archives.extract(SST2, {f"SST-2/{name}": folder / name for name in ("train.tsv", "dev.tsv")})


CORPORA: Final = {
    "training-parallel-europarl-v7.tgz": "europarl-v7.de-en",
    "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
    "training-parallel-nc-v9.tgz": "news-commentary-v9.de-en",
}
"""Archive -> name of its parallel files without the language, in the order in which they are written."""
NEWSTEST: Final = "test-full.tgz"
_TEST_FILES: Final = {"en": "newstest2014-deen-src.en.sgm", "de": "newstest2014-deen-ref.de.sgm"}
_TEST_SENTENCES: Final = 3003
_SEGMENT: Final = re.compile(r"<seg[^>]*>(.*?)</seg>", re.DOTALL)
_LANGUAGES: Final = ("en", "de")


def _write_pairs(archives: Archives, folder: Path) -> None:
    """Append the pairs of all corpora in which both sentences have text."""
    with (folder / "text.en").open("wb") as english, (folder / "text.de").open("wb") as german:
        for name, stem in CORPORA.items():
            texts = [folder / f"{stem}.{language}" for language in _LANGUAGES]
            archives.extract(name, {text.name: text for text in texts})
            with texts[0].open("rb") as first, texts[1].open("rb") as second:
                for pair in zip(first, second, strict=True):
                    sentences = [b" ".join(sentence.split()) for sentence in pair]
                    if all(sentences):
                        english.write(sentences[0] + b"\n")
                        german.write(sentences[1] + b"\n")
            for text in texts:
                text.unlink()


def _write_newstest(archives: Archives, folder: Path) -> None:
    """Write the sentences of newstest2014, which are segments of SGML files."""
    archives.extract(NEWSTEST, {name: folder / name for name in _TEST_FILES.values()})
    for language, name in _TEST_FILES.items():
        text = (folder / name).read_text(encoding="utf-8")
        lines = [" ".join(html.unescape(segment).split()) for segment in _SEGMENT.findall(text)]
        if len(lines) != _TEST_SENTENCES:
            path = archives.paths[NEWSTEST]
            raise DataError(f"{path}: {name} has {len(lines)} sentences; expected {_TEST_SENTENCES}")
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / name).unlink()


def _train_tokenizer(archives: Archives, folder: Path) -> None:
    """Train the tokenizer that the README of the case ``transformer`` describes, on the text of both languages."""
    from tokenizers import SentencePieceBPETokenizer

    texts = [str(folder.parent / "train" / f"text.{language}") for language in _LANGUAGES]
    tokenizer = SentencePieceBPETokenizer()
    tokenizer.train(texts, vocab_size=37_000, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))


PREPARATIONS: Final[dict[str, Preparation]] = {
    "c4_llama3": Preparation(
        archives=[Archive(f"{name}.{part}", None) for name in C4_SETS.values() for part in ("idx", "bin")],
        parts={
            split: Part((f"{name}.idx", f"{name}.bin"), partial(_write_c4, split)) for split, name in C4_SETS.items()
        },
    ),
    "cnn_dailymail": Preparation(
        archives=[Archive(name, None) for name in (*STORIES, *LISTS.values())],
        parts={split: Part((*STORIES, name), partial(_write_stories, split)) for split, name in LISTS.items()},
        unpacked_ratio=2.7,
    ),
    "cpm_dialogues": Preparation(
        archives=[*_DIALOGUES.values(), Archive(_VOCABULARY, None), Archive(_CPM_WEIGHTS, None)],
        parts={
            **{
                split: Part((text.name, _VOCABULARY), partial(_write_dialogues, split))
                for split, text in _DIALOGUES.items()
            },
            "initial": Part((_CPM_WEIGHTS,), lambda archives, folder: archives.place(_CPM_WEIGHTS, folder)),
        },
        requires=("accelmark[chinese]",),
    ),
    "lambada": Preparation(
        archives=[Archive(LAMBADA, None), Archive(TOKENIZER, None)],
        parts={
            "train": Part((LAMBADA, TOKENIZER), _write_novels),
            "val": Part((LAMBADA,), _write_passages),
            "tokenizer": Part((TOKENIZER,), lambda archives, folder: archives.place(TOKENIZER, folder)),
        },
        unpacked_ratio=2.0,
        requires=("accelmark[models]",),
    ),
    "samsum": Preparation(
        archives=[Archive(SAMSUM, None)],
        parts={"corpus": Part((SAMSUM,), _write_samsum)},
        unpacked_ratio=4.0,
        requires=("accelmark[archives]",),
    ),
    "sst2": Preparation(
        archives=[Archive(SST2, "9f81648d4199384278b86e315dac217c")],
        parts={"SST-2": Part((SST2,), _write_sst2)},
        unpacked_ratio=2.0,
    ),
    "wmt14": Preparation(
        archives=[
            Archive("training-parallel-europarl-v7.tgz", "c52404583294a1b609e56d45b2ed06f5"),
            Archive("training-parallel-commoncrawl.tgz", "7e0acbe86b0d7816300e14650f5b2bd4"),
            Archive("training-parallel-nc-v9.tgz", "92e42b68f9d3c2ae9722e6d1c2623e21"),
            Archive(NEWSTEST, None),
        ],
        parts={
            "train": Part(tuple(CORPORA), _write_pairs),
            "test": Part((NEWSTEST,), _write_newstest),
            "tokenizer": Part((), _train_tokenizer),
        },
        requires=("accelmark[models]",),
    ),
}
