"""WebDataset's shards of labelled images: tar archives with ``<key>.jpg`` (or .jpeg, .png) and ``<key>.cls``."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

from accelmark.spec.errors import DataError


def shards_in(directory: Path) -> Sequence[Path]:
    """Return the shards of one split in order."""
    return sorted(directory.glob("*.tar"))


def members(shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a shard, with the offsets of their content; raises DataError where it is damaged."""
    try:
        with tarfile.open(shard, "r:") as archive:
            yield from filter(tarfile.TarInfo.isreg, archive)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{shard}: is not a readable tar archive: {error}") from error


def bytes_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Return a part of a file."""
    file.seek(offset)
    return file.read(size)


def write_shard(shard: Path, images: Iterable[tuple[Path, int]]) -> None:
    """Write image files with their classes under another name, and rename the shard when it is complete."""
    unfinished = shard.with_name(f".{shard.name}.part")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path, label in images:
            image = f"{path.stem}{path.suffix.lower().replace('.jpeg', '.jpg')}"
            for name, content in ((image, path.read_bytes()), (f"{path.stem}.cls", str(label).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, BytesIO(content))
    unfinished.replace(shard)
