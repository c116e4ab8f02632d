"""The networks that a search starts from: ResNet-50 v1, and small ones for small pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from accelmark.automl.graph.layers import (
    Add,
    BatchNorm,
    Convolution,
    Dense,
    Dropout,
    GlobalPool,
    Layer,
    MaxPool,
    ReLU,
    Softmax,
)
from accelmark.automl.graph.network import INPUT, Network, Node
from accelmark.automl.graph.shapes import infer_shapes
from accelmark.spec.errors import RequestError, nearest

_RESNET50_STAGES: Final = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))


class _Builder:
    """Collects nodes one after another."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def put(self, name: str, layer: Layer, *inputs: str) -> str:
        self.nodes.append(Node(name=name, layer=layer, inputs=inputs))
        return name

    def normalised(self, name: str, convolution: Convolution, source: str, *, relu: bool = True) -> str:
        """Convolution, batch norm and, unless told otherwise, ReLU."""
        last = self.put(f"{name}_bn", BatchNorm(), self.put(f"{name}_conv", convolution, source))
        return self.put(f"{name}_relu", ReLU(), last) if relu else last

    def network(self, name: str, input_shape: tuple[int, int, int], classes: int) -> Network:
        built = Network(name=name, input_shape=input_shape, classes=classes, nodes=tuple(self.nodes))
        infer_shapes(built)
        return built


def resnet50(classes: int = 1000, side: int = 224) -> Network:
    """ResNet-50 version 1 (He et al. 2015): strides sit in each stage's first 1x1 convolutions."""
    build = _Builder()
    last = build.normalised("stem", Convolution(filters=64, kernel=7, stride=2, padding=3), INPUT)
    last = build.put("stem_pool", MaxPool(kernel=3, stride=2, padding=1), last)
    for stage, (blocks, filters, stride) in enumerate(_RESNET50_STAGES, start=2):
        for block in range(1, blocks + 1):
            name, step = f"s{stage}b{block}", stride if block == 1 else 1
            inner = build.normalised(f"{name}_1", Convolution(filters=filters, kernel=1, stride=step), last)
            inner = build.normalised(f"{name}_2", Convolution(filters=filters, kernel=3, padding=1), inner)
            inner = build.normalised(f"{name}_3", Convolution(filters=4 * filters, kernel=1), inner, relu=False)
            shortcut = last
            if block == 1:
                convolution = Convolution(filters=4 * filters, kernel=1, stride=step)
                shortcut = build.normalised(f"{name}_0", convolution, last, relu=False)
            last = build.put(f"{name}_relu", ReLU(), build.put(f"{name}_add", Add(), inner, shortcut))
    last = build.put("pool", GlobalPool(), last)
    last = build.put("dense", Dense(units=classes), last)
    build.put("softmax", Softmax(), last)
    return build.network("resnet50", (3, side, side), classes)


def small(
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    *,
    filters: tuple[int, ...] = (16, 32),
    dropout: float = 0.1,
    name: str = "small28",
) -> Network:
    """Return a plain network for small pictures: per entry of ``filters`` a 3x3 convolution and a halving.

    The default does a useful first epoch on Fashion-MNIST within seconds of one CPU core.
    """
    build = _Builder()
    last = INPUT
    for index, width in enumerate(filters, start=1):
        last = build.normalised(f"c{index}", Convolution(filters=width, kernel=3, padding=1), last)
        last = build.put(f"c{index}_pool", MaxPool(kernel=2, stride=2), last)
    last = build.put("pool", GlobalPool(), last)
    last = build.put("drop", Dropout(rate=dropout), last)
    last = build.put("dense", Dense(units=classes), last)
    build.put("softmax", Softmax(), last)
    return build.network(name, input_shape, classes)


SEEDS: Final[Mapping[str, Callable[[], Network]]] = {
    "resnet50": resnet50,
    "small28": small,
    "small32": lambda: small((3, 32, 32), 10, filters=(16, 32, 64), name="small32"),
}


def seed_network(name: str) -> Network:
    """Return a seed by name; raises RequestError with the nearest name when there is none."""
    if name not in SEEDS:
        raise RequestError(f"no seed network is called {name!r} ({nearest(name, SEEDS)})")
    return SEEDS[name]()
