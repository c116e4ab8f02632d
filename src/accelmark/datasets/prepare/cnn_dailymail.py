"""CNN/DailyMail from the stories of both newspapers and the lists of addresses of each split (version 3.0.0)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Preparation,
    opened_tar,
    regular_files,
    whole_directory,
)
from accelmark.datasets.verify import ProgressMeter
from accelmark.spec.errors import DataError

STORIES: Final = ("cnn_stories.tgz", "dailymail_stories.tgz")
LISTS: Final = {"train": "all_train.txt", "val": "all_val.txt"}
"""Split -> list of the addresses of its articles; a story is named by the SHA-1 of its address."""
_HIGHLIGHT: Final = "@highlight"
_ENDS: Final = (".", "!", "?", "...", "'", "`", '"', "\u2019", "\u201d", ")")


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``train/train.jsonl`` and ``val/val.jsonl`` in the order of the archives; complete splits are kept."""
    wanted = {split: _names(archives[name]) for split, name in LISTS.items() if not (to / split).exists()}
    with ExitStack() as stack:
        files: dict[str, IO[str]] = {}
        for split in wanted:
            part = stack.enter_context(whole_directory(to / split))
            files[split] = stack.enter_context((part / f"{split}.jsonl").open("w", encoding="utf-8"))
        for name in STORIES if wanted else ():
            for story, text in _stories(archives[name]):
                for split, left in wanted.items():
                    if story in left:
                        left.remove(story)
                        article, highlights = split_story(text)
                        files[split].write(json.dumps({"article": article, "highlights": highlights}) + "\n")
            meter.add(archives[name].stat().st_size)
        for split, left in wanted.items():
            if left:
                what = f"lack {len(left):,} stories of {LISTS[split]}, for example {min(left)}.story"
                raise DataError(f"{' and '.join(STORIES)} in {archives[STORIES[0]].parent} {what}")


def _names(path: Path) -> set[str]:
    lines = path.read_bytes().splitlines()
    return {hashlib.sha1(line.strip(), usedforsecurity=False).hexdigest() for line in lines if line.strip()}


def _stories(path: Path) -> Iterator[tuple[str, str]]:
    with opened_tar(path) as archive:
        for name, _, stream in regular_files(archive):
            if name.endswith(".story"):
                yield name.rpartition("/")[2].removesuffix(".story"), stream.read().decode("utf-8")


def split_story(text: str) -> tuple[str, str]:
    """Return the article in one line, and its highlights in a line each; lines that lack a full stop get one."""
    article: list[str] = []
    highlights: list[str] = []
    target = article
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == _HIGHLIGHT:
            target = highlights
        else:
            target.append(line if line.endswith(_ENDS) else f"{line} .")
    return " ".join(article), "\n".join(highlights)


PREPARATION: Final = Preparation(
    archives=tuple(Archive(name, None) for name in (*STORIES, *LISTS.values())), unpack=_unpack, unpacked_ratio=2.7
)
