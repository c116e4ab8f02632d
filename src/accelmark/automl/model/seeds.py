"""Seed networks of a search: ResNet-50 v1, and small ones for small images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from accelmark.automl.model import layers
from accelmark.automl.model.network import INPUT, Network, Node, load_network
from accelmark.spec.errors import RequestError, nearest

_RESNET50_STAGES: Final = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
"""(blocks, filters, stride of the first block) per stage."""


class _Builder:
    """Appends nodes to a network."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def put(self, name: str, layer: layers.Layer, *inputs: str) -> str:
        self.nodes.append(Node(name=name, layer=layer, inputs=inputs or (self.nodes[-1].name,)))
        return name

    def conv_bn(self, name: str, source: str, *, relu: bool = True, **convolution: int) -> str:
        self.put(f"{name}_conv", layers.Convolution.model_validate(convolution), source)
        last = self.put(f"{name}_bn", layers.BatchNorm())
        return self.put(f"{name}_relu", layers.ReLU()) if relu else last

    def network(self, name: str, input_shape: tuple[int, int, int], classes: int) -> Network:
        self.put("dense", layers.Dense(units=classes))
        self.put("softmax", layers.Softmax())
        return Network(name=name, input_shape=input_shape, classes=classes, nodes=tuple(self.nodes))


def resnet50(classes: int = 1000, side: int = 224) -> Network:
    """ResNet-50 version 1 (He et al. 2015): the stride is in the first 1x1 convolutions of a stage."""
    build = _Builder()
    build.conv_bn("stem", INPUT, filters=64, kernel=7, stride=2, padding=3)
    last = build.put("stem_pool", layers.MaxPool(kernel=3, stride=2, padding=1))
    for stage, (blocks, filters, stride) in enumerate(_RESNET50_STAGES, start=2):
        for block in range(1, blocks + 1):
            name, step = f"s{stage}b{block}", stride if block == 1 else 1
            inner = build.conv_bn(f"{name}_1", last, filters=filters, kernel=1, stride=step)
            inner = build.conv_bn(f"{name}_2", inner, filters=filters, kernel=3, padding=1)
            inner = build.conv_bn(f"{name}_3", inner, filters=4 * filters, kernel=1, relu=False)
            if block == 1:
                last = build.conv_bn(f"{name}_0", last, filters=4 * filters, kernel=1, stride=step, relu=False)
            build.put(f"{name}_add", layers.Add(), inner, last)
            last = build.put(f"{name}_relu", layers.ReLU())
    build.put("pool", layers.GlobalPool())
    return build.network("resnet50", (3, side, side), classes)


def small(
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    *,
    filters: tuple[int, ...] = (16, 32),
    dropout: float = 0.1,
    name: str = "small28",
) -> Network:
    """Return a plain network for small images: a 3x3 convolution and a 2x2 max pooling per entry of ``filters``."""
    build = _Builder()
    last = INPUT
    for index, width in enumerate(filters, start=1):
        build.conv_bn(f"c{index}", last, filters=width, kernel=3, padding=1)
        last = build.put(f"c{index}_pool", layers.MaxPool(kernel=2, stride=2))
    build.put("pool", layers.GlobalPool())
    build.put("drop", layers.Dropout(rate=dropout))
    return build.network(name, input_shape, classes)


SEEDS: Final[Mapping[str, Callable[[], Network]]] = {
    "resnet50": resnet50,
    "small28": small,
    "small32": lambda: small((3, 32, 32), 10, filters=(16, 32, 64), name="small32"),
}


_SIZED: Final = re.compile(r"(resnet50|small)-([1-9]\d{0,3})-([1-9]\d{0,5})")
"""Seed network, side of colour images, classes."""


def resolve_network(name: str) -> Network:
    """Return a seed network by name, or the network in a file; raises RequestError where there is neither.

    ``resnet50-<side>-<classes>`` and ``small-<side>-<classes>`` take other colour images.
    """
    if name in SEEDS:
        return SEEDS[name]()
    if sized := _SIZED.fullmatch(name):
        side, classes = int(sized[2]), int(sized[3])
        if sized[1] == "resnet50":
            return resnet50(classes, side)
        return small((3, side, side), classes, filters=(16, 32, 64), name=name)
    path = Path(name)
    if path.suffix or path.exists():
        return load_network(path)
    raise RequestError(f"no seed network is called {name!r} ({nearest(name, SEEDS)})")
