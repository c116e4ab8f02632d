"""Read labeled images (IDX of Fashion-MNIST, binary of CIFAR-10, folders or shards of ImageNet, .npz) and weights."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from accelmark.datasets.folders import ClassFolders, LabelledImages, labelled_images, read_idx
from accelmark.spec.errors import UNREADABLE, DataError, raising

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]

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

    def _decoded(self, index: int, draw: NDArray[np.float64] | None) -> Pixels:
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


Images = LabeledArrays | LabeledFiles
"""Labeled images of one shape; ``labels`` are classes from 0."""


def read_npz(path: Path, what: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of an .npz file, not pickled objects; raise DataError if it is missing or damaged."""
    damage = *UNREADABLE, zipfile.BadZipFile, zlib.error
    damaged = raising(DataError, f"{path}: cannot be read as {what} (.npz)", *damage)
    with damaged, np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


def read_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read weights from an .npz file; raises DataError where it is missing or damaged."""
    arrays = read_npz(path, "weights")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise DataError(f"{path}: cannot be read as weights: {name} holds {array.dtype}, expected floats")
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _labeled(images: NDArray[Any], labels: NDArray[Any], images_at: str, labels_at: str) -> LabeledArrays:
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

    def split(source: LabelledImages) -> LabeledFiles:
        numbers = range(len(source))
        labels = np.fromiter(map(source.label, numbers), np.int64, len(source))
        return LabeledFiles(source, np.array(numbers), labels, side)

    return split(sources[0]), split(sources[1])


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
