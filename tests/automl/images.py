"""Small synthetic images that a network can learn within a second, and workers as threads of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from accelmark.automl.cluster import WorkerPool
from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.graph import INPUT, Layer, Network, Node
from accelmark.automl.model.seeds import small
from accelmark.automl.trial.worker import TrialWorker

CLASSES = 4
SIDE = 12


def tiny_network() -> Network:
    return small((1, SIDE, SIDE), CLASSES, filters=(4, 6), name="tiny")


def chain(name: str, *layers: Layer) -> Network:
    """A network whose layers read each other in turn."""
    names = [INPUT, *(f"n{number}" for number in range(len(layers)))]
    nodes = [Node(name=names[at + 1], layer=layer, inputs=(names[at],)) for at, layer in enumerate(layers)]
    return Network(name=name, input_shape=(1, SIDE, SIDE), classes=CLASSES, nodes=tuple(nodes))


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


class ThreadActor:
    """A worker with the interface of a Ray actor: ``actor.method.remote(...).future()``."""

    def __init__(self, *arguments: Any) -> None:
        self.worker = TrialWorker(*arguments)
        self.threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="trial")

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: object) -> SimpleNamespace:
            future: Future[Any] = self.threads.submit(getattr(self.worker, method), *arguments)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)

    def end(self) -> None:
        """Cut the trial; a thread that hangs cannot be killed."""
        self.worker.cancel()
        self.threads.shutdown(wait=False)


def thread_pool(dataset: DatasetConfig, network: Network, size: int, *, threads: int = 1) -> WorkerPool:
    return WorkerPool(size, lambda: ThreadActor(dataset, network, 1, threads), ThreadActor.end)
