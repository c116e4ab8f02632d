"""Labelled images of one split: files in class folders, or members of WebDataset's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Final, Protocol, final

import numpy as np
import numpy.typing as npt
from PIL import Image

from accelmark.datasets.shards import members, shards_in
from accelmark.spec.errors import DataError
from accelmark.spec.number_format import counted

_SUFFIXES: Final = (".jpeg", ".jpg", ".png")


class LabelledImages(Protocol):
    """Images that are read by their number."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        """Return the class of an image."""
        ...

    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image; raises DataError where it is not readable, also while it is decoded."""
        ...


def labelled_images(folder: Path, num_classes: int) -> LabelledImages:
    """Return the images of a split, from its shards where it has any.

    Raises:
        DataError: there is no image, there are not ``num_classes`` classes, or a shard is damaged.
    """
    return ShardedImages(folder, num_classes) if shards_in(folder) else ClassFolders(folder, num_classes)


@contextmanager
def opened_image(source: Path | IO[bytes], name: Callable[[], object] | None = None) -> Iterator[Image.Image]:
    """Open an image; raises DataError where it is not readable, also while it is decoded.

    ``name`` returns its place for the message, where ``source`` is not its path.
    """
    try:
        with Image.open(source) as file:
            yield file
    except OSError as error:
        raise DataError(f"{name() if name else source}: is not a readable image: {error}") from error


@final
class ClassFolders:
    """``<class>/*.JPEG``; the class of an image is the index of its folder in sorted order."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if len(classes) != num_classes:
            found = counted(len(classes), "class folder") if folder.is_dir() else "no such directory"
            expected = f"{num_classes} class folders (<synset>/*.JPEG) or shards (*.tar)"
            raise DataError(f"{folder}: expected {expected} here, found {found}")
        self._files = [
            (path, label)
            for label, synset in enumerate(classes)
            for path in sorted(synset.iterdir())
            if path.name.lower().endswith(_SUFFIXES)
        ]
        if not self._files:
            raise DataError(f"{folder}: the class folders hold no image (*.JPEG, *.jpg or *.png)")

    def __len__(self) -> int:
        return len(self._files)

    def label(self, index: int) -> int:
        """Return the class of an image."""
        return self._files[index][1]

    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image file."""
        return opened_image(self._files[index][0])


@final
class ShardedImages:
    """``*.tar`` with ``<key>.jpg`` and the number of its class in ``<key>.cls``, read by offset."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        self._shards = shards_in(folder)
        self._places = np.concatenate([_places(path, place, num_classes) for place, path in enumerate(self._shards)])
        found = len(np.unique(self._places[:, 3]))
        if found != num_classes:
            raise DataError(f"{folder}: expected images of {num_classes} classes in its shards, found {found}")

    def __len__(self) -> int:
        return len(self._places)

    def label(self, index: int) -> int:
        """Return the class of an image."""
        return int(self._places[index, 3])

    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image in memory."""
        shard, offset, size, _ = self._places[index].tolist()
        path = self._shards[shard]

        def name() -> str:
            found = (member.name for member in members(path) if member.offset_data == offset)
            return f"{path}: {next(found, f'image at byte {offset}')}"

        try:
            with path.open("rb") as file:
                content = BytesIO(_bytes_at(file, offset, size))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        return opened_image(content, name)


def _places(path: Path, shard: int, num_classes: int) -> npt.NDArray[np.int64]:
    """Return shard, offset, size and class of each image of a shard."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with path.open("rb") as file:
        for member in members(path):
            key, _, suffix = member.name.rpartition(".")
            if f".{suffix.lower()}" in _SUFFIXES:
                images[key] = member.offset_data, member.size
            elif suffix == "cls":
                text = _bytes_at(file, member.offset_data, member.size).decode("ascii", "replace").strip()
                if not text.isdecimal() or int(text) >= num_classes:
                    raise DataError(f"{path}: {member.name} has {text!r}; expected a class from 0 to {num_classes - 1}")
                labels[key] = int(text)
    if unpaired := sorted(images.keys() ^ labels.keys()):
        lacks = "class (.cls)" if unpaired[0] in images else "image"
        raise DataError(f"{path}: {unpaired[0]} has no {lacks}")
    return np.array([(shard, *place, labels[key]) for key, place in images.items()], np.int64).reshape(-1, 4)


def _bytes_at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
