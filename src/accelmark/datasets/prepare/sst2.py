"""SST-2 from the archive of GLUE."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Preparation, copied, write_whole
from accelmark.datasets.verify import ProgressMeter
from accelmark.spec.errors import DataError

ARCHIVE: Final = "SST-2.zip"
_FILES: Final = ("SST-2/train.tsv", "SST-2/dev.tsv")


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``SST-2/train.tsv`` and ``SST-2/dev.tsv``."""
    path = archives[ARCHIVE]
    try:
        with zipfile.ZipFile(path) as archive:
            if missing := sorted(set(_FILES) - set(archive.namelist())):
                raise DataError(f"{path}: has no {', '.join(missing)}")
            for name in _FILES:
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as stream:
                    write_whole(to / name, copied(stream))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: is not a readable zip archive: {error}; download it again") from error
    meter.add(path.stat().st_size)


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, "9f81648d4199384278b86e315dac217c"),),
    unpack=_unpack,
    unpacked_ratio=2.0,
)
