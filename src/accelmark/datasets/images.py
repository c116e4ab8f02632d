"""Labeled images: class folders or shards of ImageNet, IDX of Fashion-MNIST, binary of CIFAR-10, .npz; and weights."""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Union

import numpy as np
import numpy.typing as npt

from accelmark.datasets.shards import IMAGE_SUFFIXES, bytes_at, shard_images, shards_in
from accelmark.spec.errors import UNREADABLE, DataError, raising
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


class LabelledImages(ABC):
    """Images with a class each, opened by their number."""

    classes: list[str]
    """Names of the classes."""
    labels: npt.NDArray[np.int64]
    """Class of each image."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image; raises DataError where it cannot be read."""


class ClassFolders(LabelledImages):
    """``<class>/*.JPEG``; the class of an image is the index of its folder in sorted order."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if len(classes) != num_classes:
            found = counted(len(classes), "class folder") if folder.is_dir() else "no such directory"
            expected = f"{num_classes} class folders (<synset>/*.JPEG) or shards (*.tar, *-of-*)"
            raise DataError(f"{folder}: expected {expected} here, found {found}")
        self.classes = [path.name for path in classes]
        self._folder = folder
        # Of millions of files, arrays are small, and stay shared with the workers that are forked from this process.
        names = []
        for synset in classes:
            with os.scandir(synset) as entries:
                images = sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES))
            names.append(np.array([os.fsencode(name) for name in images], np.bytes_))
        self._names = np.concatenate(names)
        self.labels = np.repeat(np.arange(num_classes), [len(each) for each in names])
        if not len(self._names):
            raise DataError(f"{folder}: the class folders hold no image (*.JPEG, *.jpg or *.png)")

    def opened(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image file."""
        return opened_image(self._folder / self.classes[self.labels[index]] / os.fsdecode(self._names[index]))


class ShardedImages(LabelledImages):
    """Images in shards, read by offset; names of classes are the first parts of those of ImageNet's training images."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        self._shards = shards_in(folder)
        names: dict[int, str] = {}
        places: list[npt.NDArray[np.int64]] = []
        for number, shard in enumerate(self._shards):
            images = list(shard_images(shard))
            names |= {image.label: image.name.partition("_")[0] for image in images}
            places.append(np.array([(number, *image[1:]) for image in images], np.int64).reshape(-1, 4))
        self._places = np.concatenate(places)  # shard, offset, size, class
        self.classes, self.labels = sorted(names.values()), self._places[:, 3]
        found = np.unique(self.labels)
        if found.tolist() != list(range(num_classes)):
            numbers = f" ({found[0]} to {found[-1]})" if len(found) else ""
            expected = f"{num_classes} classes (0 to {num_classes - 1})"
            raise DataError(f"{folder}: expected images of {expected} in its shards, found {len(found)}{numbers}")

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


Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]

IMAGENET_SYNSETS_SHA256: Final = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"
"""SHA-256 of the 1,000 WordNet ids of ILSVRC-2012's classes, sorted, one per line."""
IMAGENET_TRAINING: Final = 1_281_167
IMAGENET_HELD_OUT: Final = 50_000
IMAGENET_MEAN_AND_DEVIATION: Final = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR_RECORD: Final = 1 + 3 * 32 * 32
_DECODERS: Final = 8
_ARRAY_NAMES: Final = ("train_images", "train_labels", "held_out_images", "held_out_labels")


@dataclass(frozen=True)
class LabeledArrays:
    """Images in memory (number, channels, height, width); ``flip`` mirrors half of them in training."""

    pixels: Pixels
    labels: Labels
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.pixels.shape[1:]
        return (channels, height, width)

    def batch(self, indices: Indices, generator: np.random.Generator | None) -> Pixels:
        """Return images, randomly mirrored if a generator and ``flip`` are given."""
        chosen = self.pixels[indices]
        if generator is not None and self.flip:
            mirrored = generator.random(len(indices)) < 0.5
            chosen[mirrored] = chosen[mirrored][..., ::-1]
        return chosen

    def subset(self, indices: Indices) -> LabeledArrays:
        """Return the images at ``indices``."""
        return LabeledArrays(self.pixels[indices], self.labels[indices], self.flip)

    def mean_and_deviation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation per channel of the first images' pixels, scaled to 0..1."""
        sample = self.pixels[:10_000].astype(np.float32) / 255
        deviation = (max(float(value), 1e-3) for value in sample.std(axis=(0, 2, 3)))
        return tuple(map(float, sample.mean(axis=(0, 2, 3)))), tuple(deviation)


@dataclass(frozen=True)
class LabeledFiles:
    """Images of class folders or shards by their numbers, decoded to ``side`` x ``side`` pixels on demand."""

    source: LabelledImages
    numbers: Indices
    labels: Labels
    side: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        return (3, self.side, self.side)

    def batch(self, indices: Indices, generator: np.random.Generator | None) -> Pixels:
        """Return random crops, randomly mirrored, for training; else center crops."""
        draws = [None] * len(indices) if generator is None else list(generator.random((len(indices), 4)))
        with ThreadPoolExecutor(_DECODERS) as pool:
            return np.stack(list(pool.map(self._decoded, map(int, indices), draws)))

    def _decoded(self, index: int, draw: npt.NDArray[np.float64] | None) -> Pixels:
        with self.source.opened(int(self.numbers[index])) as opened:
            image = opened.convert("RGB")
        width, height = image.size
        share = 0.766 if draw is None else 0.08 + 0.92 * float(draw[0])  # area share; a 224 crop of 256 is 0.766
        edge = max(1, min(width, height, round((share * width * height) ** 0.5)))
        place = (0.5, 0.5) if draw is None else (float(draw[1]), float(draw[2]))
        left, top = round((width - edge) * place[0]), round((height - edge) * place[1])
        image = image.resize((self.side, self.side), box=(left, top, left + edge, top + edge))
        array = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
        return array[..., ::-1] if draw is not None and draw[3] < 0.5 else array

    def subset(self, indices: Indices) -> LabeledFiles:
        """Return the images at ``indices``."""
        return LabeledFiles(self.source, self.numbers[indices], self.labels[indices], self.side)

    def mean_and_deviation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation of ImageNet's pixels per channel."""
        return IMAGENET_MEAN_AND_DEVIATION


Images = Union[LabeledArrays, LabeledFiles]
"""Labeled images of one shape; ``labels`` are classes from 0."""


def read_npz(path: Path, what: str) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of an .npz file, not pickled objects; raise DataError if it is missing or damaged."""
    damage = *UNREADABLE, zipfile.BadZipFile, zlib.error
    damaged = raising(DataError, f"{path}: cannot be read as {what} (.npz)", *damage)
    with damaged, np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


def read_weights(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read weights from an .npz file; raises DataError where it is missing or damaged."""
    arrays = read_npz(path, "weights")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise DataError(f"{path}: cannot be read as weights: {name} holds {array.dtype}, expected floats")
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _labeled(images: npt.NDArray[Any], labels: npt.NDArray[Any], images_at: str, labels_at: str) -> LabeledArrays:
    """Check arrays of images and labels; ``images_at`` and ``labels_at`` name them in errors."""
    if images.ndim != 4 or images.dtype != np.uint8:
        expected = "bytes (uint8) with four axes (number, channels, height, width)"
        raise DataError(f"{images_at}: holds {images.dtype} of shape {images.shape}; expected {expected}")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise DataError(f"{labels_at}: expected {len(images)} integers, the class of each image from 0")
    return LabeledArrays(images, labels.astype(np.int64))


def read_fashion_mnist(directory: Path) -> tuple[Images, Images]:
    """Read four IDX files, plain or gzipped: training and held-out images."""

    def split(name: str) -> LabeledArrays:
        images, labels = f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte"
        arrays = read_idx(directory, images, 3)[:, None], read_idx(directory, labels, 1)
        return _labeled(*arrays, str(directory / images), str(directory / labels))

    return split("train"), split("t10k")


def read_cifar10(directory: Path) -> tuple[Images, Images]:
    """Read CIFAR-10's binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    train = [_cifar(directory / f"data_batch_{number}.bin") for number in range(1, 6)]
    pixels, labels = (np.concatenate([part[index] for part in train]) for index in (0, 1))
    return LabeledArrays(pixels, labels, flip=True), LabeledArrays(*_cifar(directory / "test_batch.bin"))


def _cifar(path: Path) -> tuple[Pixels, Labels]:
    try:
        raw = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{path}: a split is missing ({error.strerror}); the binary version is needed") from error
    if raw.size == 0 or raw.size % _CIFAR_RECORD:
        raise DataError(f"{path}: {raw.size} bytes are not a whole number of {_CIFAR_RECORD}-byte records")
    records = raw.reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_imagenet(train: Path, held_out: Path, side: int, classes: int) -> tuple[Images, Images]:
    """Read two directories of class folders or of shards; those with folders must have the same classes."""
    sources = [labelled_images(folder, classes) for folder in (train, held_out)]
    names = [set(source.classes) for source in sources if isinstance(source, ClassFolders)]
    if names and (differing := names[0] ^ names[-1]):
        example = ", ".join(sorted(differing)[:3])
        raise DataError(f"{train} and {held_out} have different classes, for example {example}")

    training, testing = (LabeledFiles(source, np.arange(len(source)), source.labels, side) for source in sources)
    return training, testing


def imagenet_identity(training: Images, held_out: Images) -> str:
    """Return ``imagenet`` where these are the images of ILSVRC-2012, else a description.

    Compares the names of the training images' classes and the number of images, not the images' content.
    """
    source = training.source if isinstance(training, LabeledFiles) else None
    classes = [] if source is None else source.classes
    if hashlib.sha256("\n".join(classes).encode()).hexdigest() != IMAGENET_SYNSETS_SHA256:
        kind = "folders" if isinstance(source, ClassFolders) else "shards"
        return f"{kind} of {len(classes)} other classes than ImageNet's"
    if (len(training), len(held_out)) != (IMAGENET_TRAINING, IMAGENET_HELD_OUT):
        return f"a part of imagenet ({len(training):,} training and {len(held_out):,} held-out images)"
    return "imagenet"


def read_arrays(path: Path) -> tuple[Images, Images]:
    """Read an .npz file with train_images, train_labels, held_out_images and held_out_labels; images are uint8."""
    arrays = read_npz(path, "images")
    missing = sorted(set(_ARRAY_NAMES) - set(arrays))
    if missing:
        raise DataError(f"{path}: a split is missing: no {', '.join(missing)}")

    def split(images: str, labels: str) -> LabeledArrays:
        return _labeled(arrays[images], arrays[labels], f"{path}: {images}", f"{path}: {labels}")

    return split(*_ARRAY_NAMES[:2]), split(*_ARRAY_NAMES[2:])


READERS: Final = {"fashion-mnist": read_fashion_mnist, "cifar-10": read_cifar10, "arrays": read_arrays}
"""Readers of a whole data set in one directory or file, by its name."""
