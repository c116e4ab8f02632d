"""Is it ImageNet: told by the classes and the number of pictures, not by the name that a configuration gives it."""

from __future__ import annotations

import hashlib
from typing import Final

from accelmark.automl.data.pictures import FolderPictures, Pictures

SYNSETS_SHA256: Final = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"
"""Of the 1,000 WordNet ids of ILSVRC-2012's classes, sorted, one a line."""
TRAINING: Final = 1_281_167
HELD_OUT: Final = 50_000


def imagenet_identity(training: Pictures, held_out: Pictures) -> str:
    """Return ``imagenet`` when these are the folders of ILSVRC-2012, else what they are instead.

    Classes are compared by the names of their folders, splits by how many pictures they have; what the pictures show is
    not looked at.
    """
    classes = _classes(training)
    if hashlib.sha256("\n".join(classes).encode()).hexdigest() != SYNSETS_SHA256:
        return f"folders of {len(classes)} other classes than ImageNet's"
    if (len(training), len(held_out)) != (TRAINING, HELD_OUT):
        return f"a part of imagenet ({len(training):,} training and {len(held_out):,} held-out pictures)"
    return "imagenet"


def _classes(pictures: Pictures) -> list[str]:
    return sorted({file.parent.name for file in pictures.files}) if isinstance(pictures, FolderPictures) else []
