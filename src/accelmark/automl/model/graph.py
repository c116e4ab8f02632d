"""Networks as frozen data: layers, the shape that each computes, nodes in topological order, main chain, skips."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, ValidationError

from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import Spec, problems_of

PositiveInt = Annotated[int, Field(ge=1, le=1_000_000)]
Padding = Annotated[int, Field(ge=0, le=1_000)]
Shape = tuple[int, ...]
"""(channels, height, width) of a feature map, (features,) of a vector; without the batch axis."""


class StrictSpec(Spec, strict=True):
    """Base of layers, nodes and networks; values of another type are errors instead of being converted."""


class Convolution(StrictSpec):
    """Square 2-d convolution; ``padding`` is in pixels per side."""

    kind: Literal["convolution"] = "convolution"
    filters: PositiveInt
    kernel: PositiveInt
    stride: PositiveInt = 1
    padding: Padding = 0
    bias: bool = False


class BatchNorm(StrictSpec):
    """Batch normalization over channels, with learned scale and shift."""

    kind: Literal["batch_norm"] = "batch_norm"
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class ReLU(StrictSpec):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"


class Add(StrictSpec):
    """Element-wise sum of two or more tensors of the same shape."""

    kind: Literal["add"] = "add"


class Concat(StrictSpec):
    """Concatenation of two or more tensors along the channels."""

    kind: Literal["concat"] = "concat"


class MaxPool(StrictSpec):
    """Maximum of each window; padding is never the maximum."""

    kind: Literal["max_pool"] = "max_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class AveragePool(StrictSpec):
    """Mean of each window; padding counts as zero."""

    kind: Literal["average_pool"] = "average_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class GlobalPool(StrictSpec):
    """Mean of each channel: (channels, height, width) -> (channels,)."""

    kind: Literal["global_pool"] = "global_pool"


class Dense(StrictSpec):
    """Fully connected layer over a flat input."""

    kind: Literal["dense"] = "dense"
    units: PositiveInt
    bias: bool = True


class Dropout(StrictSpec):
    """Zeroes a fraction ``rate`` of its input during training."""

    kind: Literal["dropout"] = "dropout"
    rate: Annotated[float, Field(ge=0, lt=1)]


class Softmax(StrictSpec):
    """Class scores -> probabilities; the last layer of every network."""

    kind: Literal["softmax"] = "softmax"


class Flatten(StrictSpec):
    """(channels, height, width) -> (channels x height x width,), channel by channel."""

    kind: Literal["flatten"] = "flatten"


Layer = Annotated[
    Convolution | BatchNorm | ReLU | Add | Concat | MaxPool | AveragePool | GlobalPool | Dense | Dropout | Softmax
    | Flatten,
    Field(discriminator="kind"),
]  # fmt: skip


BATCH_NORM_ARRAYS: Final = ("weight", "bias", "running_mean", "running_var")


def parameter_shapes(layer: Layer, channels: int) -> dict[str, Shape]:
    """Return the shapes of a layer's weight, bias and running statistics by name, for this number of input channels."""
    match layer:
        case BatchNorm():
            return dict.fromkeys(BATCH_NORM_ARRAYS, (channels,))
        case Convolution(filters=out, kernel=kernel):
            weight: Shape = (out, channels, kernel, kernel)
        case Dense(units=out):
            weight = (out, channels)
        case _:
            return {}
    return {"weight": weight} | ({"bias": (out,)} if layer.bias else {})


def output_shape(layer: Layer, sources: Sequence[Shape]) -> Shape:
    """Return the output shape of ``layer`` for inputs of these shapes; raises ValueError with the reason."""
    found = ", ".join(map(str, sources))
    if isinstance(layer, Add | Concat):
        if len(sources) < 2:
            raise ValueError(f"a {layer.kind} reads two or more inputs, not {len(sources)}")
        if isinstance(layer, Add) and len(set(sources)) > 1:
            raise ValueError(f"an add needs equal shapes, not {found}")
        if len({source[1:] for source in sources}) > 1:
            raise ValueError(f"a concat needs equal height and width, not {found}")
        return sources[0] if isinstance(layer, Add) else (sum(source[0] for source in sources), *sources[0][1:])
    if len(sources) != 1:
        raise ValueError(f"a {layer.kind} reads one input, not {len(sources)}")
    source = sources[0]
    match layer:
        case BatchNorm() | ReLU() | Dropout():
            return source
        case Flatten():
            return (prod(source),)
        case Dense() | Softmax():
            if len(source) != 1:
                raise ValueError(f"a {layer.kind} reads a flat input, not shape {found}; flatten or pool it first")
            return (layer.units,) if isinstance(layer, Dense) else source
    if len(source) != 3:
        raise ValueError(f"a {layer.kind} reads (channels, height, width), not shape {found}")
    if isinstance(layer, GlobalPool):
        return source[:1]
    kernel, padding = layer.kernel, layer.padding
    if not isinstance(layer, Convolution) and 2 * padding > kernel:
        raise ValueError(f"padding {padding} is more than half of the {kernel}-pixel window")
    sides = [(side + 2 * padding - kernel) // layer.stride + 1 for side in source[1:]]
    if min(sides) < 1:
        window, image = f"{kernel}x{kernel}", f"{source[1]}x{source[2]}"
        raise ValueError(f"a window of {window} does not fit into {image} with padding {padding}")
    return (layer.filters if isinstance(layer, Convolution) else source[0], *sides)


INPUT: Final = "input"
"""Name of the input image in the nodes' inputs."""

NodeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,95}$")]


class Node(StrictSpec):
    """A layer, its name, and the nodes whose outputs it reads, in order."""

    name: NodeName
    layer: Layer
    inputs: tuple[NodeName, ...]


class Network(StrictSpec):
    """A feed-forward network for images of ``input_shape`` (channels, height, width); the last node is its output."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    classes: Annotated[int, Field(ge=2, le=1_000_000)]
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def convolutions(self) -> Mapping[str, Convolution]:
        """The convolutions by name."""
        return {node.name: node.layer for node in self.nodes if isinstance(node.layer, Convolution)}

    def with_nodes(self, nodes: Iterable[Node]) -> Network:
        """Return a copy with other nodes, each valid by itself; connections are not checked."""
        return Network.model_construct(**dict(self) | {"nodes": tuple(nodes)})

    def with_layers(self, changed: Mapping[str, Layer]) -> Network:
        """Return a copy in which the named nodes have other layers."""
        nodes = {name: self.by_name[name].model_copy(update={"layer": layer}) for name, layer in changed.items()}
        return self.with_nodes(nodes.get(node.name, node) for node in self.nodes)

    def inserted_after(self, anchor: str, added: Sequence[Node]) -> Network:
        """Return a copy with ``added`` after ``anchor``; former readers of ``anchor`` now read the last of them."""
        nodes: list[Node] = []
        for node in self.nodes:
            sources = tuple(added[-1].name if source == anchor else source for source in node.inputs)
            nodes.append(node if sources == node.inputs else node.model_copy(update={"inputs": sources}))
            if node.name == anchor:
                nodes.extend(added)
        return self.with_nodes(nodes)

    def to_json(self) -> str:
        """Return the JSON form; equal networks give equal bytes."""
        return self.model_dump_json(indent=2) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of layers and connections; independent of the network's name."""
        return hashlib.sha256(self.model_dump_json(exclude={"name"}).encode()).hexdigest()


def load_network(path: Path) -> Network:
    """Read a network file; raises SpecError with all problems where it is missing, malformed or cannot be built."""
    where = str(path)
    try:
        network = Network.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError([Problem(where, "", f"cannot be read: {error.strerror}")]) from error
    except ValidationError as error:
        raise SpecError(problems_of(error, Network, where)) from error
    if problems := find_problems(network, where=where):
        raise SpecError(problems)
    return network


def infer_shapes(network: Network) -> Mapping[str, Shape]:
    """Return the output shape of every node and of the image; raises SpecError with all problems."""
    shapes, problems = _walk(network, network.name)
    if problems:
        raise SpecError(problems)
    return shapes


def find_problems(network: Network, *, where: str = "network") -> list[Problem]:
    """Return all reasons why the network cannot be built; none where it can."""
    return _walk(network, where)[1]


def _walk(network: Network, where: str) -> tuple[dict[str, Shape], list[Problem]]:
    shapes: dict[str, Shape] = {INPUT: network.input_shape}
    problems: list[Problem] = []
    known = {node.name for node in network.nodes} | {INPUT}
    read = {source for node in network.nodes for source in node.inputs}
    defined = {INPUT}

    def add(key: str, what: str, hint: str = "") -> None:
        problems.append(Problem(where, key, what, hint))

    for index, node in enumerate(network.nodes):
        key, is_last = f"nodes.{index}.{node.name}", index == len(network.nodes) - 1
        if node.name in defined:
            add(key, f"the name {node.name!r} is used twice")
        for source in node.inputs:
            if source not in known:
                add(key, f"reads unknown node {source!r}", nearest(source, known))
            elif source not in defined:
                add(key, f"reads {source!r}, which is the node itself or comes later")
        defined.add(node.name)
        if all(source in shapes for source in node.inputs):  # else the cause is reported already
            try:
                shapes[node.name] = output_shape(node.layer, [shapes[source] for source in node.inputs])
            except ValueError as error:
                add(key, str(error))
        if not is_last and node.name not in read:
            add(key, "no node reads this node", "connect or remove it")
        if is_last != isinstance(node.layer, Softmax):
            what = f"the last node is {node.layer.kind}, must be a softmax"
            add(key, what if is_last else "only the last node may be a softmax")
    if INPUT not in read:
        add("nodes", "no node reads the image", f"one node must read {INPUT!r}")
    output = shapes.get(network.nodes[-1].name, (network.classes,))
    if output != (network.classes,):
        add("classes", f"the output has shape {output}, expected {network.classes} classes")
    return shapes, problems


class Skip(NamedTuple):
    """A branch that leaves the main chain after ``start`` layers and joins it at layer ``end``."""

    start: int
    end: int
    merge: Literal["add", "concat"]


def main_chain(network: Network) -> tuple[str, ...]:
    """Return the longest path from image to output as node names; of equally long ones that of the first input."""
    depth: dict[str, int] = {INPUT: 0}
    before: dict[str, str] = {}
    for node in network.nodes:
        source = max(node.inputs, key=lambda name: depth[name])
        depth[node.name] = depth[source] + 1
        before[node.name] = source
    chain = [network.nodes[-1].name]
    while before[chain[-1]] != INPUT:
        chain.append(before[chain[-1]])
    return tuple(reversed(chain))


def skips(network: Network) -> tuple[Skip, ...]:
    """Return the branches that leave the main chain and join it again."""
    place = {name: index for index, name in enumerate((INPUT, *main_chain(network)))}
    origin = dict(place)
    found: list[Skip] = []
    for node in network.nodes:
        if node.name not in place:
            origin[node.name] = max(origin[source] for source in node.inputs)
        elif isinstance(node.layer, Add | Concat):
            on_chain = max(node.inputs, key=lambda name: place.get(name, -1))
            ends = [source for source in node.inputs if source != on_chain]
            found.extend(Skip(origin[source], place[node.name], node.layer.kind) for source in ends)
    return tuple(found)
