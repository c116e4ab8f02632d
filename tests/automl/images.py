"""Small synthetic images that a network can learn within a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.network import Network
from accelmark.automl.model.seeds import small

CLASSES = 4
SIDE = 12


def tiny_network() -> Network:
    return small((1, SIDE, SIDE), CLASSES, filters=(4, 6), name="tiny")


def write_images(path: Path, *, train: int = 320, held_out: int = 80, classes: int = CLASSES) -> Path:
    """One bright bar per class at its own height, in noise."""
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    for name, count in (("train", train), ("held_out", held_out)):
        labels = np.arange(count) % classes
        images = generator.integers(0, 120, (count, 1, SIDE, SIDE), dtype=np.uint8)
        for index, label in enumerate(labels):
            images[index, 0, 1 + label * 3 : 3 + label * 3] += 100
        arrays |= {f"{name}_images": images, f"{name}_labels": labels}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def tiny_dataset(directory: Path) -> DatasetConfig:
    return DatasetConfig(name="arrays", directory=write_images(directory / "images.npz"), validation_share=0.2)
