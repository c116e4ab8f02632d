"""The file layouts of data sets: Fashion-MNIST's IDX, CIFAR-10's binary records, ImageNet's folders, plain arrays."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.automl.data.arrays import checked_pictures, read_npz
from accelmark.automl.data.pictures import ArrayPictures, FolderPictures, Images, Labels, Pictures
from accelmark.spec.errors import DataError

_IDX_BYTES: Final = 8
_CIFAR_RECORD: Final = 1 + 3 * 32 * 32
_SUFFIXES: Final = {".jpeg", ".jpg", ".png"}

Pair = tuple[Pictures, Pictures]
"""The training pictures and the held-out ones."""


def read_fashion_mnist(directory: Path) -> Pair:
    """Read four IDX files, plain or gzipped."""
    train, held_out = (
        checked_pictures(
            _idx(directory, images := f"{name}-images-idx3-ubyte", 3)[:, None],
            _idx(directory, labels := f"{name}-labels-idx1-ubyte", 1),
            images_at=str(directory / images),
            labels_at=str(directory / labels),
        )
        for name in ("train", "t10k")
    )
    return train, held_out


def _idx(directory: Path, name: str, axes: int) -> Images:
    packed, plain = directory / f"{name}.gz", directory / name
    try:
        raw = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{directory}: a split is missing: neither {name} nor {name}.gz is there") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{packed}: cannot be unpacked: {error}") from error
    header = 4 * (1 + axes)
    if len(raw) < header or raw[:4] != bytes((0, 0, _IDX_BYTES, axes)):
        raise DataError(f"{directory / name}: is no IDX file of bytes with {axes} axes")
    shape = np.frombuffer(raw, ">i4", axes, offset=4)
    if (shape < 0).any() or int(np.prod(shape, dtype=np.int64)) != len(raw) - header:
        raise DataError(f"{directory / name}: says {shape.tolist()}, but holds {len(raw) - header} values")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_cifar10(directory: Path) -> Pair:
    """Read CIFAR-10's binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    train = [_cifar(directory / f"data_batch_{number}.bin") for number in range(1, 6)]
    test = _cifar(directory / "test_batch.bin")
    images, labels = (np.concatenate([part[index] for part in train]) for index in (0, 1))
    return ArrayPictures(images, labels, flip=True), ArrayPictures(*test)


def _cifar(path: Path) -> tuple[Images, Labels]:
    try:
        raw = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{path}: a split is missing ({error.strerror}); the binary version is needed") from error
    if raw.size == 0 or raw.size % _CIFAR_RECORD:
        raise DataError(f"{path}: {raw.size} bytes are no whole number of {_CIFAR_RECORD}-byte records")
    records = raw.reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_imagenet(train: Path, held_out: Path, side: int) -> Pair:
    """Read two folders of one folder a class; both must have the same classes."""
    names = [_classes(folder) for folder in (train, held_out)]
    if names[0] != names[1]:
        differing = sorted(set(names[0]) ^ set(names[1]))[:3]
        raise DataError(f"{train} and {held_out} have different classes, for example {', '.join(differing)}")
    return _folder(train, names[0], side), _folder(held_out, names[0], side)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder}: a split is missing: no such folder")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(f"{folder}: holds no folder of a class")
    return names


def _folder(folder: Path, names: list[str], side: int) -> Pictures:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in _SUFFIXES)
        if not found:
            raise DataError(f"{folder / name}: holds no picture")
        files.extend(found)
        labels.extend([label] * len(found))
    return FolderPictures(files, np.array(labels, dtype=np.int64), side)


def read_arrays(path: Path) -> Pair:
    """Read an .npz file with train_images, train_labels, held_out_images and held_out_labels, images uint8."""
    arrays = read_npz(path, "pictures")
    missing = {"train_images", "train_labels", "held_out_images", "held_out_labels"} - set(arrays)
    if missing:
        raise DataError(f"{path}: a split is missing: no {', '.join(sorted(missing))}")
    train, held_out = (
        checked_pictures(
            arrays[images := f"{name}_images"],
            arrays[labels := f"{name}_labels"],
            images_at=f"{path}: {images}",
            labels_at=f"{path}: {labels}",
        )
        for name in ("train", "held_out")
    )
    return train, held_out
