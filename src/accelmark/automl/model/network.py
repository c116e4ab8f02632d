"""A network as data: named nodes in topological order, validation, JSON, main chain and skip connections."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, ValidationError

from accelmark.automl.model import layers
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import problems_of

INPUT: Final = "input"
"""Name of the input image in the nodes' inputs."""

NodeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,95}$")]


class Node(layers.StrictSpec):
    """A layer, its name, and the nodes whose outputs it reads, in order."""

    name: NodeName
    layer: layers.Layer
    inputs: tuple[NodeName, ...]


class Network(layers.StrictSpec):
    """A feed-forward network for images of ``input_shape`` (channels, height, width); the last node is its output."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input_shape: tuple[layers.PositiveInt, layers.PositiveInt, layers.PositiveInt]
    classes: Annotated[int, Field(ge=2, le=1_000_000)]
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def convolutions(self) -> Mapping[str, layers.Convolution]:
        """The convolutions by name."""
        return {node.name: node.layer for node in self.nodes if isinstance(node.layer, layers.Convolution)}

    def with_nodes(self, nodes: Iterable[Node]) -> Network:
        """Return a copy with other nodes, each valid by itself; connections are not checked."""
        return Network.model_construct(**dict(self) | {"nodes": tuple(nodes)})

    def with_layers(self, changed: Mapping[str, layers.Layer]) -> Network:
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


def infer_shapes(network: Network) -> Mapping[str, layers.Shape]:
    """Return the output shape of every node and of the image; raises SpecError with all problems."""
    shapes, problems = _walk(network, network.name)
    if problems:
        raise SpecError(problems)
    return shapes


def find_problems(network: Network, *, where: str = "network") -> list[Problem]:
    """Return all reasons why the network cannot be built; none where it can."""
    return _walk(network, where)[1]


def _walk(network: Network, where: str) -> tuple[dict[str, layers.Shape], list[Problem]]:
    shapes: dict[str, layers.Shape] = {INPUT: network.input_shape}
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
                shapes[node.name] = layers.output_shape(node.layer, [shapes[source] for source in node.inputs])
            except ValueError as error:
                add(key, str(error))
        if not is_last and node.name not in read:
            add(key, "no node reads this node", "connect or remove it")
        if is_last != isinstance(node.layer, layers.Softmax):
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
        elif isinstance(node.layer, layers.Add | layers.Concat):
            on_chain = max(node.inputs, key=lambda name: place.get(name, -1))
            ends = [source for source in node.inputs if source != on_chain]
            found.extend(Skip(origin[source], place[node.name], node.layer.kind) for source in ends)
    return tuple(found)
