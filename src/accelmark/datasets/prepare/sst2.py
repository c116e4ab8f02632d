"""SST-2 from the archive of GLUE."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation

ARCHIVE: Final = "SST-2.zip"


def _write(archives: Archives, folder: Path) -> None:
    archives.extract(ARCHIVE, {f"SST-2/{name}": folder / name for name in ("train.tsv", "dev.tsv")})


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, "9f81648d4199384278b86e315dac217c"),),
    parts={"SST-2": Part((ARCHIVE,), _write)},
    unpacked_ratio=2.0,
)
