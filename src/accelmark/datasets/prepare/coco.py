"""COCO 2017 with boxes from its published archives."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation

SPLITS: Final = ("train2017", "val2017")
ANNOTATIONS: Final = "annotations_trainval2017.zip"


def _write_annotations(archives: Archives, folder: Path) -> None:
    names = [f"instances_{split}.json" for split in SPLITS]
    archives.extract(ANNOTATIONS, {f"annotations/{name}": folder / name for name in names})


def _write_images(split: str, archives: Archives, folder: Path) -> None:
    """Write the images that the annotations list."""
    content = json.loads((folder.parent / "annotations" / f"instances_{split}.json").read_bytes())
    names = [image["file_name"] for image in content["images"]]
    archives.extract(f"{split}.zip", {f"{split}/{name}": folder / name for name in names})


PREPARATION: Final = Preparation(
    archives=(
        Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
        Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
        Archive(ANNOTATIONS, "f4bbac642086de4f52a3fdda2de5fa2c"),
    ),
    parts={
        "annotations": Part((ANNOTATIONS,), _write_annotations),
        **{split: Part((f"{split}.zip",), partial(_write_images, split)) for split in SPLITS},
    },
    unpacked_ratio=1.02,
)
