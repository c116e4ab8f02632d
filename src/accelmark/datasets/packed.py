"""Files that sources hold packed."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Final

from accelmark.datasets.spec import DatasetSpec, FileSpec

_CHUNK: Final = 1 << 20


class FetchError(Exception):
    """A source did not give what it should; the message says why."""


def most_bytes(file: FileSpec) -> int:
    """Return the most bytes a source may hold for ``file``: packed, it can be a little longer than its content."""
    return file.bytes if file.packed is None else file.bytes + file.bytes // 1000 + 4096


def unpack_all(spec: DatasetSpec, directory: Path) -> None:
    """Replace every packed file of ``spec`` in ``directory`` by its content.

    Raises:
        FetchError: a file is damaged, or longer than it should be.
        OSError: a file cannot be written.
    """
    for file in spec.files:
        if file.packed is None:
            continue
        source = directory / file.source_path
        done = 0
        try:
            with gzip.open(source, "rb") as packed, (directory / file.path).open("wb") as target:
                while chunk := packed.read(_CHUNK):
                    done += len(chunk)
                    if done > file.bytes:
                        raise FetchError(f"{file.source_path} holds more than the expected {file.bytes:,} bytes")
                    target.write(chunk)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise FetchError(f"{file.source_path} cannot be unpacked: {error}") from error
        source.unlink()
