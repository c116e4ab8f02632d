"""Morphs: changes of a network's structure, which of them a network allows, and searched settings written into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, count
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

from pydantic import Field

from accelmark.automl.model import counting, graph
from accelmark.automl.model.graph import INPUT, Network, Node, find_problems, infer_shapes, main_chain
from accelmark.spec.errors import AccelmarkError, SpecError
from accelmark.spec.model import Spec

if TYPE_CHECKING:
    import numpy as np

MorphKind = Literal["deepen", "widen", "add-skip", "concat-skip", "kernel-grow"]
MORPH_KINDS: Final[tuple[MorphKind, ...]] = get_args(MorphKind)
_DRAWS: Final = 60
_DEEPEN_KERNEL: Final = 3


class MorphError(AccelmarkError):
    """A morph that the network does not allow."""


class Morph(Spec):
    """One change of a network.

    at     the ReLU after which to deepen or where a skip leaves, or the convolution to widen or whose kernel to grow
    to     the node where a skip joins the main chain
    size   the new kernel (deepen, kernel-grow) or the new number of filters (widen)
    label  prefix of the names of inserted nodes
    seed   of all random choices
    """

    kind: MorphKind
    at: str
    to: str | None = None
    size: Annotated[int, Field(ge=0)] = 0
    label: str = ""
    seed: int = 0

    def __str__(self) -> str:
        target = f"{self.at} -> {self.to}" if self.to else self.at
        return f"{self.kind} {target}" + (f" ({self.size})" if self.size else "")


def apply_morph(network: Network, morph: Morph) -> Network:
    """Return the morphed network; raises MorphError where the network does not allow this morph."""
    old, plain = network.convolutions.get(morph.at), morph.model_copy(update={"label": "", "seed": 0})
    if morph.kind == "kernel-grow":  # by any even step: a smaller searched kernel may have been written since
        is_allowed = old is not None and morph.size > old.kernel and (morph.size - old.kernel) % 2 == 0
    else:
        is_allowed = plain in MorphChoices(network, _UNBOUNDED).of(morph.kind)
    if not is_allowed:
        raise MorphError(f"{network.name!r} does not allow {morph}")
    child = _morphed(network, morph)
    if problems := find_problems(child):
        raise MorphError(f"{morph} does not fit: {SpecError(problems)}")
    return child


def _morphed(network: Network, morph: Morph) -> Network:
    at, label, size = morph.at, morph.label, morph.size
    if morph.kind == "widen":
        group = channel_groups(network)[at]
        return network.with_layers({n: network.convolutions[n].model_copy(update={"filters": size}) for n in group})
    if morph.kind == "kernel-grow":
        old = network.convolutions[at]
        changes = {"kernel": size, "padding": old.padding + (size - old.kernel) // 2}
        return network.with_layers({at: old.model_copy(update=changes)})
    shapes = infer_shapes(network)
    if morph.kind == "deepen":
        convolution = graph.Convolution(filters=shapes[at][0], kernel=size, padding=size // 2)
        added = _chain(label, at, conv=convolution, bn=graph.BatchNorm(), relu=graph.ReLU())
        return network.inserted_after(at, added)
    to = morph.to or ""
    start, end, stride = shapes[at], shapes[to], _skip_stride(shapes[at], shapes[to]) or 1
    if morph.kind == "add-skip":
        resized = {} if start == end else {"conv": graph.Convolution(filters=end[0], kernel=1, stride=stride)}
        branch = _chain(label, at, **resized, bn=graph.BatchNorm())
        merged = [Node(name=f"{label}_add", layer=graph.Add(), inputs=(to, branch[-1].name))]
    else:
        resized = {"conv": graph.Convolution(filters=start[0], kernel=1, stride=stride)} if stride > 1 else {}
        branch = _chain(label, at, **resized)
        joined = (to, branch[-1].name if branch else at)
        merged = [Node(name=f"{label}_concat", layer=graph.Concat(), inputs=joined)]
        fuse = graph.Convolution(filters=end[0], kernel=1, bias=True)
        merged += _chain(label, merged[0].name, fuse=fuse, relu=graph.ReLU())
    return network.inserted_after(to, [*branch, *merged])


def _chain(label: str, source: str, **added: graph.Layer) -> list[Node]:
    """Return new nodes, each reading the one before it and the first one ``source``."""
    nodes: list[Node] = []
    for suffix, layer in added.items():
        nodes.append(Node(name=f"{label}_{suffix}", layer=layer, inputs=(source,)))
        source = nodes[-1].name
    return nodes


def _skip_stride(start: graph.Shape, end: graph.Shape) -> int | None:
    """Return the stride of a 1x1 convolution from ``start``'s height and width to ``end``'s; None: there is none."""
    stride = -(-start[1] // end[1])
    fits = all((side - 1) // stride + 1 == wanted for side, wanted in zip(start[1:], end[1:], strict=True))
    return stride if fits else None


def channel_groups(network: Network) -> dict[str, list[str]]:
    """Return for every node and the image the nodes that determine its channels, which have equally many channels."""
    groups = {INPUT: [INPUT]}
    for node in network.nodes:
        if isinstance(node.layer, graph.Convolution | graph.Dense | graph.Concat | graph.Flatten):
            groups[node.name] = [node.name]
            continue
        group = groups[node.name] = groups[node.inputs[0]]
        for other in (groups[source] for source in node.inputs[1:]):  # of an add
            if other is not group:
                group += other
                groups |= {name: group for name, members in groups.items() if members is other}
    return groups


_Bound = Annotated[int, Field(strict=True, ge=1)]


class MorphLimits(Spec):
    """Upper bounds on networks; None: unbounded."""

    max_filters: _Bound = 4096
    """Filters of a convolution."""
    max_kernel: _Bound = 7
    """Width of a convolution's kernel."""
    max_nodes: _Bound = 1000
    """Nodes of the network's graph."""
    max_parameters: _Bound | None = None
    """Parameters of the whole network."""
    max_forward_operations: _Bound | None = None
    """Operations of the whole network on one image; a multiply-accumulate is two."""

    def allow(self, network: Network) -> bool:
        """Return whether the whole network is within the bounds."""
        if self.max_parameters is None and self.max_forward_operations is None:
            return True
        counted = counting.count(network, "accelmark")
        return (self.max_parameters is None or counted.parameters <= self.max_parameters) and (
            self.max_forward_operations is None or counted.matrix_forward <= self.max_forward_operations
        )


_UNBOUNDED: Final = MorphLimits(max_filters=10**9, max_kernel=10**9, max_nodes=10**9)


class MorphChoices:
    """The morphs that one network allows, computed lazily per kind."""

    def __init__(self, network: Network, limits: MorphLimits | None = None) -> None:
        self.network: Final = network
        self.limits: Final = limits or MorphLimits()
        self._found: dict[MorphKind, tuple[Morph, ...]] = {}

    def of(self, kind: MorphKind) -> tuple[Morph, ...]:
        """Return all morphs of a kind in order, without labels and seeds."""
        if kind not in self._found:
            self._found[kind] = tuple(self._find(kind))
        return self._found[kind]

    def draw(self, generator: np.random.Generator, kinds: Iterable[MorphKind] = MORPH_KINDS) -> tuple[Morph, Network]:
        """Draw a kind, then one of its morphs, both uniformly; raises MorphError where none is within the limits."""
        remaining = list(dict.fromkeys(kinds))
        for _ in range(_DRAWS):
            if not remaining:
                break
            kind = remaining[int(generator.integers(len(remaining)))]
            if not (choices := self.of(kind)):
                remaining.remove(kind)
                continue
            morph, child = self.make(choices[int(generator.integers(len(choices)))], generator)
            if self.limits.allow(child):
                return morph, child
        raise MorphError(f"{self.network.name!r} allows no further morph within the limits")

    def make(self, chosen: Morph, generator: np.random.Generator) -> tuple[Morph, Network]:
        """Return one of the morphs with a label and a seed, and the network that it makes."""
        used = {name.partition("_")[0] for name in self.network.by_name}
        label = next(label for label in map("m{}".format, count(1)) if label not in used)
        morph = chosen.model_copy(update={"label": label, "seed": int(generator.integers(2**31))})
        return morph, _morphed(self.network, morph)

    def _find(self, kind: MorphKind) -> Iterator[Morph]:
        network, shapes, limits = self.network, infer_shapes(self.network), self.limits
        chain = main_chain(network)
        convolutions = [(name, network.convolutions[name]) for name in chain if name in network.convolutions]
        relus = [name for name in chain if network.by_name[name].layer.kind == "relu" and len(shapes[name]) == 3]
        match kind:
            case "widen":
                groups = channel_groups(network)
                for name, layer in convolutions:
                    # The channels of the image, concats, dense and flatten layers are fixed.
                    if 2 * layer.filters <= limits.max_filters and network.convolutions.keys() >= set(groups[name]):
                        yield Morph(kind=kind, at=name, size=2 * layer.filters)
            case "kernel-grow":
                for name, layer in convolutions:
                    if layer.kernel % 2 and layer.kernel + 2 <= limits.max_kernel:
                        yield Morph(kind=kind, at=name, size=layer.kernel + 2)
            case _ if len(network.nodes) >= limits.max_nodes:
                return
            case "deepen":
                yield from (Morph(kind=kind, at=name, size=_DEEPEN_KERNEL) for name in relus)
            case _:
                stride = cache(_skip_stride)
                for start, end in combinations(relus, 2):
                    if stride(shapes[start], shapes[end]) is not None:
                        yield Morph(kind=kind, at=start, to=end)


def with_kernel(network: Network, kernel: int) -> Network:
    """Return the network with this odd kernel in all convolutions that keep the size, but those that read the image."""
    spatial = {
        node.name: node.layer.model_copy(update={"kernel": kernel, "padding": kernel // 2})
        for node in network.nodes
        if isinstance(node.layer, graph.Convolution) and node.layer.kernel > 1 and INPUT not in node.inputs
        if node.layer.padding == node.layer.kernel // 2
    }
    return network.with_layers(spatial)


def with_dropout(network: Network, rate: float) -> Network:
    """Return the network with all dropout at ``rate``; where there is none, one is put before the last dense layer."""
    dropouts = [node.name for node in network.nodes if isinstance(node.layer, graph.Dropout)]
    if dropouts:
        return network.with_layers(dict.fromkeys(dropouts, graph.Dropout(rate=rate)))
    nodes = list(network.nodes)
    dense = next((index for index, node in reversed([*enumerate(nodes)]) if isinstance(node.layer, graph.Dense)), None)
    if dense is not None:
        dropout = Node(name="searched_dropout", layer=graph.Dropout(rate=rate), inputs=nodes[dense].inputs)
        nodes[dense] = nodes[dense].model_copy(update={"inputs": (dropout.name,)})
        nodes.insert(dense, dropout)
    return network.with_nodes(nodes)
