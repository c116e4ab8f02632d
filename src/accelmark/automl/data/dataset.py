"""Open the data of a search, split it, and check it against the network before any trial starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.automl.config import DatasetConfig
from accelmark.automl.data.imagenet import imagenet_identity
from accelmark.automl.data.layouts import Pair, read_arrays, read_cifar10, read_fashion_mnist, read_imagenet
from accelmark.automl.data.pictures import ArrayPictures, Pictures
from accelmark.automl.graph import Network
from accelmark.datasets import ensure
from accelmark.datasets.spec import known_dataset
from accelmark.spec.errors import DataError

_FETCHED: Final = {"fashion-mnist": "fashion_mnist"}
_SPLIT_SEED: Final = 20_240_601
_IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
_IMAGENET_DEVIATION: Final = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Three sets of pictures: to train on, to validate on while searching, and held out for the scored error.

    ``mean`` and ``deviation`` are per channel, of pictures scaled to 0..1. ``fingerprint`` tells which labels were
    in which split; a run can only be resumed on the same. ``identity`` is the data set's name as the rules take it:
    ``imagenet`` only where the folders are those of ILSVRC-2012.
    """

    name: str
    training: Pictures
    validation: Pictures
    held_out: Pictures
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    fingerprint: str
    identity: str


def open_dataset(config: DatasetConfig, network: Network) -> Dataset:
    """Open, split and check; raises DataError: a split missing, another shape, labels beyond the classes."""
    everything, held_out = _read(config, network)
    for name, pictures in (("training", everything), ("held-out", held_out)):
        _check(name, pictures, network, config.name)
    identity = imagenet_identity(everything, held_out) if config.name == "imagenet" else config.name
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(everything))
    if config.limit is not None:
        order = order[: config.limit]
        held_out = held_out.subset(np.arange(min(config.limit, len(held_out))))
    validated = round(len(order) * config.validation_share)
    if not 0 < validated < len(order):
        raise DataError(f"{len(order)} training pictures leave nothing to validate on, or to train on")
    training, validation = everything.subset(order[validated:]), everything.subset(order[:validated])
    mean, deviation = _statistics(training)
    digest = hashlib.sha256()
    for pictures in (training, validation, held_out):
        digest.update(pictures.labels.tobytes())
    return Dataset(config.name, training, validation, held_out, mean, deviation, digest.hexdigest(), identity)


def _read(config: DatasetConfig, network: Network) -> Pair:
    if config.name == "imagenet":
        root = config.directory or Path()
        train = config.train_directory or root / "train"
        return read_imagenet(train, config.held_out_directory or root / "val", network.input_shape[1])
    directory = config.directory
    if directory is None and config.name in _FETCHED:
        directory = ensure(known_dataset(_FETCHED[config.name], "dataset.name"))
    if directory is None:
        raise DataError(f"data set {config.name}: say where it lies (dataset.directory)")
    if not directory.exists():
        raise DataError(f"data set {config.name}: there is no {directory}")
    match config.name:
        case "fashion-mnist":
            return read_fashion_mnist(directory)
        case "cifar-10":
            return read_cifar10(directory)
        case "arrays":
            return read_arrays(directory)


def _check(split: str, pictures: Pictures, network: Network, name: str) -> None:
    if len(pictures) == 0:
        raise DataError(f"data set {name}: the {split} split is empty")
    if pictures.shape != network.input_shape:
        raise DataError(
            f"data set {name}: {split} pictures are {pictures.shape}, network {network.name!r} takes"
            f" {network.input_shape} (channels, height, width)"
        )
    lowest, highest = int(pictures.labels.min()), int(pictures.labels.max())
    if lowest < 0 or highest + 1 != network.classes:
        raise DataError(
            f"data set {name}: the {split} split has classes {lowest} to {highest}, network {network.name!r}"
            f" tells {network.classes} classes apart"
        )


def _statistics(pictures: Pictures) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not isinstance(pictures, ArrayPictures):
        return _IMAGENET_MEAN, _IMAGENET_DEVIATION
    sample = pictures.images[:10_000].astype(np.float32) / 255
    mean, deviation = sample.mean(axis=(0, 2, 3)), sample.std(axis=(0, 2, 3))
    return tuple(float(value) for value in mean), tuple(max(float(value), 1e-3) for value in deviation)
