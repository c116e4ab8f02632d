"""Seed networks of a search: ResNet-50 v1, and small ones for small images; weights to start from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.automl.model import graph
from accelmark.automl.model.graph import INPUT, Network, Node, load_network
from accelmark.automl.model.weights import Array
from accelmark.datasets.images import IMAGENET_MEAN_AND_DEVIATION, read_weights
from accelmark.spec.errors import DataError, RequestError, nearest, raising
from accelmark.spec.plugins.requirements import require

_RESNET50_STAGES: Final = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
"""(blocks, filters, stride of the first block) per stage."""
_KERAS_LAYERS: Final = {"conv1": "stem_conv", "bn_conv1": "stem_bn", "fc1000": "dense"}
_KERAS_BLOCK: Final = re.compile(r"(res|bn)(\d)([a-f])_branch(1|2[abc])")
_KERAS_BRANCHES: Final = {"1": 0, "2a": 1, "2b": 2, "2c": 3}
_KERAS_EPSILON: Final = 1e-3
_KERAS_MEANS: Final = np.array([123.68, 116.779, 103.939])
"""Of red, green and blue, which Keras subtracts from pixels."""


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def put(self, name: str, layer: graph.Layer, *inputs: str) -> str:
        self.nodes.append(Node(name=name, layer=layer, inputs=inputs or (self.nodes[-1].name,)))
        return name

    def conv_bn(self, name: str, source: str, *, relu: bool = True, **convolution: int) -> str:
        self.put(f"{name}_conv", graph.Convolution.model_validate(convolution), source)
        last = self.put(f"{name}_bn", graph.BatchNorm())
        return self.put(f"{name}_relu", graph.ReLU()) if relu else last

    def network(self, name: str, input_shape: tuple[int, int, int], classes: int) -> Network:
        self.put("dense", graph.Dense(units=classes))
        self.put("softmax", graph.Softmax())
        return Network(name=name, input_shape=input_shape, classes=classes, nodes=tuple(self.nodes))


def resnet50(classes: int = 1000, side: int = 224) -> Network:
    """ResNet-50 version 1 (He et al. 2015): the stride is in the first 1x1 convolutions of a stage."""
    build = _Builder()
    build.conv_bn("stem", INPUT, filters=64, kernel=7, stride=2, padding=3)
    last = build.put("stem_pool", graph.MaxPool(kernel=3, stride=2, padding=1))
    for stage, (blocks, filters, stride) in enumerate(_RESNET50_STAGES, start=2):
        for block in range(1, blocks + 1):
            name, step = f"s{stage}b{block}", stride if block == 1 else 1
            inner = build.conv_bn(f"{name}_1", last, filters=filters, kernel=1, stride=step)
            inner = build.conv_bn(f"{name}_2", inner, filters=filters, kernel=3, padding=1)
            inner = build.conv_bn(f"{name}_3", inner, filters=4 * filters, kernel=1, relu=False)
            if block == 1:
                last = build.conv_bn(f"{name}_0", last, filters=4 * filters, kernel=1, stride=step, relu=False)
            build.put(f"{name}_add", graph.Add(), inner, last)
            last = build.put(f"{name}_relu", graph.ReLU())
    build.put("pool", graph.GlobalPool())
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
        last = build.put(f"c{index}_pool", graph.MaxPool(kernel=2, stride=2))
    build.put("pool", graph.GlobalPool())
    build.put("drop", graph.Dropout(rate=dropout))
    return build.network(name, input_shape, classes)


SEEDS: Final[Mapping[str, Callable[[], Network]]] = {
    "resnet50": resnet50,
    "small28": small,
    "small32": lambda: small((3, 32, 32), 10, filters=(16, 32, 64), name="small32"),
}


_SIZED: Final = re.compile(r"(resnet50|small)-([1-9]\d{0,3})-([1-9]\d{0,5})")
"""Seed network, side of colour images, classes."""


def resolve_network(name: str) -> Network:
    """Return a seed network by name or size (``small-<side>-<classes>``), or the network in a file."""
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


def seed_weights(path: Path) -> dict[str, Array]:
    """Read the weights of a seed network: an .npz file, or Keras' of ResNet-50 (``.h5``); raises DataError."""
    if path.suffix != ".h5":
        return read_weights(path)
    require(f"{path.name}", "h5py>=3.10")
    import h5py

    with raising(DataError, f"{path}: cannot be read as Keras' weights of ResNet-50", OSError, KeyError, ValueError):
        with h5py.File(path) as file:
            arrays = {
                layer: [np.asarray(group[name], np.float32) for name in group.attrs["weight_names"]]
                for layer, group in file.items()
            }
        return _from_keras({layer: parts for layer, parts in arrays.items() if parts})


def _from_keras(arrays: Mapping[str, list[Array]]) -> dict[str, Array]:
    """Return Keras' weights under the names of :func:`resnet50`, with which it computes what Keras' network does.

    That takes pixels from 0 to 255 without their means, blue first, and adds another epsilon in batch norm. Its biases
    are subtracted from the means of the batch norms after them.
    """
    found: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    for layer, parts in arrays.items():
        if (name := _KERAS_LAYERS.get(layer)) is None:
            if (block := _KERAS_BLOCK.fullmatch(layer)) is None:
                raise ValueError(f"it has a layer {layer}")
            kind, stage, letter, branch = block.groups()
            number = ord(letter) - ord("a") + 1
            name = f"s{stage}b{number}_{_KERAS_BRANCHES[branch]}_{'conv' if kind == 'res' else 'bn'}"
        if name.endswith("_bn"):
            parts = [*parts[:3], parts[3] + np.float32(_KERAS_EPSILON - graph.BatchNorm().epsilon)]
            found |= {f"{name}.{part}": array for part, array in zip(graph.BATCH_NORM_ARRAYS, parts, strict=True)}
        elif name == "dense":
            found |= {"dense.weight": parts[0].T, "dense.bias": parts[1]}
        else:
            found[f"{name}.weight"] = parts[0].transpose(3, 2, 0, 1)
            biases[f"{name.removesuffix('_conv')}_bn.running_mean"] = parts[1]
    mean, deviation = (255 * np.array(values) for values in IMAGENET_MEAN_AND_DEVIATION)
    kernel = found["stem_conv.weight"][:, ::-1]
    biases["stem_bn.running_mean"] = biases["stem_bn.running_mean"] + kernel.sum(axis=(2, 3)) @ (mean - _KERAS_MEANS)
    found["stem_conv.weight"] = kernel * deviation[:, None, None]
    found |= {name: found[name] - bias for name, bias in biases.items()}
    return {name: array.astype(np.float32) for name, array in found.items()}
