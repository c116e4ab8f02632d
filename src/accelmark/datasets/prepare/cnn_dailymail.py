"""CNN/DailyMail from the stories of both newspapers and the lists of addresses of each split (version 3.0.0)."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

STORIES: Final = ("cnn_stories.tgz", "dailymail_stories.tgz")
LISTS: Final = {"train": "all_train.txt", "val": "all_val.txt"}
"""Split -> list of the addresses of its articles; a story is named by the SHA-1 of its address."""
_HIGHLIGHT: Final = "@highlight"
_ENDS: Final = (".", "!", "?", "...", "'", "`", '"', "\u2019", "\u201d", ")")


def _write(split: str, archives: Archives, folder: Path) -> None:
    """Write ``<split>.jsonl`` in the order of the archives."""
    lines = archives.paths[LISTS[split]].read_bytes().splitlines()
    left = {hashlib.sha1(line.strip(), usedforsecurity=False).hexdigest() for line in lines if line.strip()}
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for member, stream in (entry for name in STORIES for entry in archives.members(name)):
            story = member.rpartition("/")[2].removesuffix(".story")
            if story in left:
                left.remove(story)
                article, highlights = split_story(stream.read().decode("utf-8"))
                file.write(json.dumps({"article": article, "highlights": highlights}) + "\n")
    if left:
        problem = f"lack {len(left):,} stories of {LISTS[split]}, for example {min(left)}.story"
        raise DataError(f"{' and '.join(STORIES)} in {archives.paths[STORIES[0]].parent} {problem}")


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
    archives=tuple(Archive(name, None) for name in (*STORIES, *LISTS.values())),
    parts={split: Part((*STORIES, name), partial(_write, split)) for split, name in LISTS.items()},
    unpacked_ratio=2.7,
)
