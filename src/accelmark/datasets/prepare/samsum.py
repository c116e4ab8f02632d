"""SAMSum from the archive beside its paper (arXiv:1911.12237)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

ARCHIVE: Final = "corpus.7z"
DIALOGUES: Final = {"train.json": 14_732, "val.json": 818, "test.json": 819}
"""File -> number of its dialogues, as in the paper's table 2."""


def _write(archives: Archives, folder: Path) -> None:
    import py7zr

    path = archives.paths[ARCHIVE]
    try:
        with py7zr.SevenZipFile(path) as archive:
            archive.extract(folder, targets=list(DIALOGUES))
    except (py7zr.exceptions.ArchiveError, lzma.LZMAError, EOFError, OSError) as error:
        raise DataError(f"{path}: is not a readable 7z archive: {error}; download it again") from error
    for name, expected in DIALOGUES.items():
        if (number := _num_dialogues(folder / name, path)) != expected:
            raise DataError(f"{path}: {name} has {number:,} dialogues instead of {expected:,}")


def _num_dialogues(file: Path, archive: Path) -> int:
    try:
        dialogues = json.loads(file.read_text(encoding="utf-8"))
        return sum(isinstance(entry["dialogue"], str) and isinstance(entry["summary"], str) for entry in dialogues)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{archive}: {file.name} is not a list of dialogues with summaries: {error!r}") from error


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, None),),
    parts={"corpus": Part((ARCHIVE,), _write)},
    unpacked_ratio=4.0,
    requires=("accelmark[archives]",),
)
