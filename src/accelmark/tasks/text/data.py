"""Text of public data sets, line by line: parallel files, JSON lines, and tables with tabs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, final

import numpy as np

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, nearest, raising

_CHUNK: Final = 1 << 24


class Records(Protocol):
    """Rows of some texts each."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[str, ...]:
        """Return the texts of row ``index``."""


@final
class Lines:
    """The lines of a UTF-8 file, which is indexed but not kept in memory; raises DataError where it is not readable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, done = [np.zeros(1, np.int64)], 0
        with raising(DataError, f"{path}: cannot be read", OSError), path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + done + 1)
                done += len(chunk)
        self._starts = np.concatenate(starts)
        if self._starts[-1] != done:
            self._starts = np.append(self._starts, done)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def where(self, index: int) -> str:
        """Return file and number of a line, for messages."""
        return f"{self._path}:{index + 1}"

    def text(self, index: int) -> str:
        """Return a line without its end."""
        start, end = self._starts[index : index + 2].tolist()
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        with raising(DataError, f"{self.where(index)}: is not UTF-8", UnicodeDecodeError):
            return line.decode("utf-8").rstrip("\r\n")


@final
class Parallel:
    """Files of which line N of each belongs together; raises DataError where their numbers of lines differ."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [Lines(path) for path in paths]
        counts = {str(path): len(file) for path, file in zip_strict(paths, self._files)}
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{path}: {count:,}" for path, count in counts.items())
            raise DataError(f"parallel files have different numbers of lines: {found}")

    def __len__(self) -> int:
        return len(self._files[0])

    def row(self, index: int) -> tuple[str, ...]:
        """Return line ``index`` of each file."""
        return tuple(file.text(index) for file in self._files)


@final
class JsonLines:
    """Some keys of a file with a JSON object in each line."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._lines, self._keys = Lines(path), tuple(keys)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the values of the keys; raises DataError with file and line where there is no such text."""
        with raising(DataError, f"{self._lines.where(index)}: is not a JSON object", json.JSONDecodeError):
            entry = json.loads(self._lines.text(index))
        for key in self._keys:
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
                has = ", ".join(map(repr, entry)) if isinstance(entry, dict) else type(entry).__name__
                raise DataError(f"{self._lines.where(index)}: has no text {key!r}; it has {has}")
        return tuple(entry[key] for key in self._keys)


@final
class Table:
    """Some columns of a file with tabs between columns, whose first line has their names (the layout of GLUE)."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._lines = Lines(path)
        self._header = self._lines.text(0).split("\t") if len(self._lines) else []
        for column in columns:
            if column not in self._header:
                raise DataError(f"{path}:1: has no column {column!r} ({nearest(column, self._header)})")
        self._columns = [self._header.index(column) for column in columns]

    def __len__(self) -> int:
        return len(self._lines) - 1

    def where(self, index: int) -> str:
        """Return file and number of the line of row ``index``."""
        return self._lines.where(index + 1)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the values of the columns."""
        cells = self._lines.text(index + 1).split("\t")
        if len(cells) != len(self._header):
            raise DataError(f"{self.where(index)}: has {len(cells)} columns; the first line has {len(self._header)}")
        return tuple(cells[column] for column in self._columns)
