"""Data of a search: images split into training, validation and held-out, and checked against the network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.graph import Network
from accelmark.datasets.ensure import ensure
from accelmark.datasets.images import READERS, Images, imagenet_identity, read_imagenet
from accelmark.datasets.spec import known_dataset
from accelmark.spec.errors import DataError, RequestError

_FETCHED: Final = {"fashion-mnist": "fashion_mnist"}
_SPLIT_SEED: Final = 20_240_601


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images to train on, to validate the search on, and held out for the scored error.

    ``mean`` and ``deviation`` are per channel, of pixels scaled to 0..1; ``fingerprint`` is the SHA-256 of all labels.
    """

    name: str
    training: Images
    validation: Images
    held_out: Images
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    fingerprint: str
    identity: str


def open_dataset(config: DatasetConfig, network: Network) -> Dataset:
    """Open, split and check the data; raises DataError where a split is missing, malformed or of another shape."""
    everything, held_out = _read(config, network)
    for split, images in (("training", everything), ("held-out", held_out)):
        where = f"data set {config.name}: the {split} split"
        if len(images) == 0:
            raise DataError(f"{where} is empty")
        if images.shape != network.input_shape:
            wanted = f"network {network.name!r} takes {network.input_shape} (channels, height, width)"
            raise DataError(f"{where} has images of {images.shape}, {wanted}")
        lowest, highest = int(images.labels.min()), int(images.labels.max())
        if lowest < 0 or highest + 1 != network.classes:
            wanted = f"network {network.name!r} has {network.classes} classes"
            raise DataError(f"{where} has classes {lowest} to {highest}, {wanted}")
    identity = imagenet_identity(everything, held_out) if config.name == "imagenet" else config.name
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(everything))
    if config.limit is not None:
        order = order[: config.limit]
        held_out = held_out.subset(np.arange(min(config.limit, len(held_out))))
    validated = round(len(order) * config.validation_share)
    if not 0 < validated < len(order):
        raise DataError(f"{len(order)} training images are too few to train and validate on")
    training, validation = everything.subset(order[validated:]), everything.subset(order[:validated])
    digest = hashlib.sha256(b"".join(images.labels.tobytes() for images in (training, validation, held_out)))
    scales = training.mean_and_deviation()
    return Dataset(config.name, training, validation, held_out, *scales, digest.hexdigest(), identity)


def _read(config: DatasetConfig, network: Network) -> tuple[Images, Images]:
    if config.name == "imagenet":
        root = config.directory or Path()
        train, held_out = config.train_directory or root / "train", config.held_out_directory or root / "val"
        return read_imagenet(train, held_out, network.input_shape[1], network.classes)
    directory = config.directory
    if directory is None and config.name in _FETCHED:
        directory = ensure(known_dataset(_FETCHED[config.name], "dataset.name"))
    if directory is None:
        raise RequestError(f"data set {config.name}: give its location in dataset.directory")
    if not directory.exists():
        raise DataError(f"data set {config.name}: there is no {directory}")
    return READERS[config.name](directory)
