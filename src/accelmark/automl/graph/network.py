"""A network as data: named nodes in topological order, and its JSON form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from accelmark.automl.graph.layers import Layer, PositiveInt
from accelmark.spec.errors import Problem, SpecError

INPUT: Final = "input"
SCHEMA_VERSION: Final = 1

NodeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,95}$")]


class NetworkError(SpecError):
    """A network that cannot be built, with every reason found."""


class Node(BaseModel):
    """One layer, what it is called, and the nodes whose outputs it reads, in order."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: NodeName
    layer: Layer
    inputs: tuple[NodeName, ...]


class Network(BaseModel):
    """A feed-forward network for pictures: nodes in topological order, the last one its output.

    ``input_shape`` is (channels, height, width). The picture itself is called ``input`` in the nodes' inputs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    classes: Annotated[int, Field(ge=2, le=1_000_000)]
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """For each node (and the picture) the names of the nodes that read it."""
        readers: dict[str, list[str]] = {name: [] for name in (INPUT, *(node.name for node in self.nodes))}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                readers.setdefault(source, []).append(node.name)
        return {name: tuple(names) for name, names in readers.items()}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Each node's place in the order; the picture is at -1."""
        return {INPUT: -1} | {node.name: index for index, node in enumerate(self.nodes)}

    @property
    def output(self) -> str:
        """The name of the last node."""
        return self.nodes[-1].name

    def replaced(self, changes: Mapping[str, Layer], *, name: str | None = None) -> Network:
        """Return a copy with the layers of the named nodes exchanged."""
        nodes = tuple(
            node.model_copy(update={"layer": changes[node.name]}) if node.name in changes else node
            for node in self.nodes
        )
        return rebuilt(self, nodes, name=name)

    def inserted_after(self, anchor: str, added: Iterable[Node], *, reads: str) -> Network:
        """Return a copy with ``added`` placed after ``anchor``, whose readers now read ``reads``.

        The added nodes themselves may go on reading ``anchor``.
        """
        nodes: list[Node] = []
        for node in self.nodes:
            sources = tuple(reads if source == anchor else source for source in node.inputs)
            nodes.append(node if sources == node.inputs else node.model_copy(update={"inputs": sources}))
            if node.name == anchor:
                nodes.extend(added)
        return rebuilt(self, tuple(nodes))

    def to_json(self) -> str:
        """Return the network as JSON, the same bytes for the same network."""
        return self.model_dump_json(indent=2) + "\n"


def rebuilt(network: Network, nodes: tuple[Node, ...], *, name: str | None = None) -> Network:
    """Return a network like ``network`` with other nodes (already checked one by one)."""
    return Network.model_construct(
        schema_version=SCHEMA_VERSION,
        name=name or network.name,
        input_shape=network.input_shape,
        classes=network.classes,
        nodes=nodes,
    )


def parse_network(text: str, *, where: str = "network") -> Network:
    """Read a network from JSON and check that it can be built; raises NetworkError with every problem."""
    from accelmark.automl.graph.shapes import find_problems

    try:
        network = Network.model_validate_json(text)
    except ValidationError as error:
        raise NetworkError(_spelled_out(error, where)) from error
    problems = find_problems(network, where=where)
    if problems:
        raise NetworkError(problems)
    return network


def load_network(path: Path) -> Network:
    """Read a network file; raises NetworkError when it is missing, malformed or impossible."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NetworkError([Problem(str(path), "", f"cannot be read: {why}")]) from error
    return parse_network(text, where=str(path))


def _spelled_out(error: ValidationError, where: str) -> list[Problem]:
    return [Problem(where, ".".join(str(part) for part in entry["loc"]), entry["msg"]) for entry in error.errors()]
