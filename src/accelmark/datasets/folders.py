"""Labelled images: in class folders or in shards, opened by their number; and arrays in IDX files."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Union, final

import numpy as np
import numpy.typing as npt

from accelmark.datasets.shards import IMAGE_SUFFIXES, bytes_at, shard_images, shards_in
from accelmark.spec.errors import DataError
from accelmark.spec.number_format import counted

if TYPE_CHECKING:
    from PIL import Image

_IDX_BYTES: Final = 8


@contextmanager
def opened_image(source: Path | IO[bytes], name: Callable[[], object] | None = None) -> Iterator[Image.Image]:
    """Open an image; raises DataError where it is not readable, also while it is decoded.

    ``name`` returns its place for the message, where ``source`` is not its path.
    """
    from PIL import Image

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
            expected = f"{num_classes} class folders (<synset>/*.JPEG) or shards (*.tar, *-of-*)"
            raise DataError(f"{folder}: expected {expected} here, found {found}")
        self.classes = [path.name for path in classes]
        """The names of the folders, whose numbers are the classes."""
        self._folder = folder
        # Of millions of files, arrays are small, and stay shared with the workers that are forked from this process.
        names = []
        for synset in classes:
            with os.scandir(synset) as entries:
                images = sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES))
            names.append(np.array([os.fsencode(name) for name in images], np.bytes_))
        self._names = np.concatenate(names)
        self._labels = np.repeat(np.arange(num_classes), [len(each) for each in names])
        if not len(self._names):
            raise DataError(f"{folder}: the class folders hold no image (*.JPEG, *.jpg or *.png)")

    def __len__(self) -> int:
        return len(self._names)

    def label(self, index: int) -> int:
        """Return the class of an image."""
        return int(self._labels[index])

    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image file."""
        return opened_image(self._folder / self.classes[self.label(index)] / os.fsdecode(self._names[index]))


@final
class ShardedImages:
    """Images in shards, read by offset."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        self._shards = shards_in(folder)
        names: dict[int, str] = {}
        places: list[npt.NDArray[np.int64]] = []
        for number, shard in enumerate(self._shards):
            images = list(shard_images(shard))
            names |= {image.label: image.name.partition("_")[0] for image in images}
            places.append(np.array([(number, *image[1:]) for image in images], np.int64).reshape(-1, 4))
        self._places = np.concatenate(places)  # shard, offset, size, class
        self.classes = sorted(names.values())
        """The first parts of the images' names, which are the names of their classes in ImageNet's training images."""
        found = np.unique(self._places[:, 3])
        if found.tolist() != list(range(num_classes)):
            numbers = f" ({found[0]} to {found[-1]})" if len(found) else ""
            expected = f"{num_classes} classes (0 to {num_classes - 1})"
            raise DataError(f"{folder}: expected images of {expected} in its shards, found {len(found)}{numbers}")

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
            names = (image.name for image in shard_images(path) if image.offset == offset)
            return f"{path}: {next(names, f'image at byte {offset}')}"

        try:
            with path.open("rb") as file:
                content = BytesIO(bytes_at(file, offset, size))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        return opened_image(content, name)


LabelledImages = Union[ClassFolders, ShardedImages]


def labelled_images(folder: Path, num_classes: int) -> LabelledImages:
    """Return the images of a split, from its shards where it has any.

    Raises DataError: there is no image, there are not ``num_classes`` classes, or a shard is damaged.
    """
    return ShardedImages(folder, num_classes) if shards_in(folder) else ClassFolders(folder, num_classes)


def read_idx(directory: Path, name: str, axes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of an IDX file, plain or gzipped, in its shape; raises DataError where it is damaged."""
    packed, plain = directory / f"{name}.gz", directory / name
    try:
        raw = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{directory}: a split is missing: there is neither {name} nor {name}.gz") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{packed}: cannot be unpacked: {error}") from error
    header = 4 * (1 + axes)
    if len(raw) < header or raw[:4] != bytes((0, 0, _IDX_BYTES, axes)):
        raise DataError(f"{plain}: is not an IDX file of bytes with {axes} axes")
    shape = np.frombuffer(raw, ">i4", axes, offset=4)
    if (shape < 0).any() or int(np.prod(shape, dtype=np.int64)) != len(raw) - header:
        raise DataError(f"{plain}: its header says {shape.tolist()}, it holds {len(raw) - header} values")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
