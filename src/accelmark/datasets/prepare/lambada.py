"""LAMBADA: the training novels as tokens of GPT-2, and the test passages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation, write_whole
from accelmark.spec.errors import DataError, first_line

ARCHIVE: Final = "lambada-dataset.tar.gz"
TOKENIZER: Final = "tokenizer.json"
NOVELS: Final = "train-novels.tar"
PASSAGES: Final = "lambada_test_plain_text.txt"
END: Final = "<|endoftext|>"
"""Token after each novel."""


def _write_novels(archives: Archives, folder: Path) -> None:
    """Write ``novels.bin`` (little-endian uint16)."""
    tokenizer = _tokenizer(archives.paths[TOKENIZER])
    for name, stream in archives.members(ARCHIVE):
        if name.endswith(f"/{NOVELS}"):
            write_whole(folder / "novels.bin", _tokens(archives, stream, tokenizer))
            return
    raise DataError(f"{archives.paths[ARCHIVE]}: has no {NOVELS}; download it again")


def _tokens(archives: Archives, novels: IO[bytes], tokenizer: Any) -> Iterator[bytes]:
    """Yield the tokens of each novel, with the end of a text after it."""
    path = archives.paths[ARCHIVE]
    for name, stream in archives.tar_members(path, novels):
        if name.endswith(".txt"):
            ids = tokenizer.encode(_text(path, name, stream.read()), add_special_tokens=False).ids
            yield np.array([*ids, tokenizer.token_to_id(END)], "<u2").tobytes()


def _write_passages(archives: Archives, folder: Path) -> None:
    """Write each passage as a line of JSON to ``test.jsonl``; a model predicts its last word."""
    plain = folder / PASSAGES
    archives.extract(ARCHIVE, {PASSAGES: plain})
    lines = _text(archives.paths[ARCHIVE], PASSAGES, plain.read_bytes()).split("\n")
    write_whole(folder / "test.jsonl", (f"{json.dumps({'text': line})}\n".encode() for line in lines if line.strip()))
    plain.unlink()


def _text(path: Path, name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {name} is not UTF-8: {error}; download it again") from error


def _tokenizer(path: Path) -> Any:
    """Return the tokenizer; raises DataError where it is not GPT-2's by its last token."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises this class itself
        raise DataError(f"{path}: is not a tokenizer: {first_line(error)}") from error
    if tokenizer.token_to_id(END) is None or tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise DataError(f"{path}: is not GPT-2's: it has no token {END}, or more than 65,536 tokens")
    return tokenizer


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, None), Archive(TOKENIZER, None)),
    parts={
        "train": Part((ARCHIVE, TOKENIZER), _write_novels),
        "val": Part((ARCHIVE,), _write_passages),
        "tokenizer": Part((TOKENIZER,), lambda archives, folder: archives.place(TOKENIZER, folder)),
    },
    unpacked_ratio=2.0,
    requires=("accelmark[models]",),
)
