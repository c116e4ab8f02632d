"""Morphs: changes of a network's structure, which of them a network allows, and searched settings written into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, count
from typing import Annotated, Final, Literal, get_args

import numpy as np
from pydantic import Field

from accelmark.automl.model import counting, layers
from accelmark.automl.model.network import INPUT, Network, NetworkError, Node, find_problems, infer_shapes, main_chain
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.model import Spec

MorphKind = Literal["deepen", "widen", "add-skip", "concat-skip", "kernel-grow"]
MORPH_KINDS: Final[tuple[MorphKind, ...]] = get_args(MorphKind)
_DRAWS: Final = 60
_DEEPEN_KERNEL: Final = 3


class MorphError(AccelmarkError):
    """A morph that the network does not allow."""


class Morph(Spec):
    """One change of a network.

    at     the node it starts from: the ReLU after which to deepen or from which a skip leaves, or the convolution to
           widen or whose kernel to grow
    to     the node where a skip joins the main chain
    size   the new kernel (deepen, kernel-grow) or the new number of filters (widen)
    label  prefix of the names of inserted nodes
    seed   of all random choices: which filters are copied, how weights are split, initial weights of new layers
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
    """Return the morphed network.

    Raises:
        MorphError: the network does not allow this morph.
    """
    if morph.at not in network.by_name:
        raise MorphError(f"{morph}: there is no node {morph.at!r}")
    change = {
        "deepen": _deepen, "widen": _widen, "kernel-grow": _grow_kernel, "add-skip": _add_skip,
        "concat-skip": _concat_skip,
    }[morph.kind]  # fmt: skip
    child = change(network, morph)
    if problems := find_problems(child):
        raise MorphError(f"{morph} does not fit: {NetworkError(problems)}")
    return child


def _convolution_at(network: Network, morph: Morph) -> layers.Convolution:
    layer = network.by_name[morph.at].layer
    if not isinstance(layer, layers.Convolution):
        raise MorphError(f"{morph}: {morph.at!r} is a {layer.kind}, not a convolution")
    return layer


def _chain(morph: Morph, source: str, **added: layers.Layer) -> list[Node]:
    """Return new nodes named after the morph, each reading the one before it and the first one ``source``."""
    nodes: list[Node] = []
    for suffix, layer in added.items():
        nodes.append(Node(name=f"{morph.label}_{suffix}", layer=layer, inputs=(source,)))
        source = nodes[-1].name
    return nodes


def _deepen(network: Network, morph: Morph) -> Network:
    if not isinstance(network.by_name[morph.at].layer, layers.ReLU) or morph.size % 2 == 0:
        raise MorphError(f"{morph}: deepening needs a ReLU and an odd kernel")
    channels = infer_shapes(network)[morph.at][0]
    convolution = layers.Convolution(filters=channels, kernel=morph.size, padding=morph.size // 2)
    added = _chain(morph, morph.at, conv=convolution, bn=layers.BatchNorm(), relu=layers.ReLU())
    return network.inserted_after(morph.at, added, reads=added[-1].name)


def _widen(network: Network, morph: Morph) -> Network:
    layer = _convolution_at(network, morph)
    if morph.size <= layer.filters:
        raise MorphError(f"{morph}: the convolution has {layer.filters} filters already")
    members = channel_group(network, morph.at)
    wider = {name: network.by_name[name].layer.model_copy(update={"filters": morph.size}) for name in members}
    return network.with_layers(wider)


def _grow_kernel(network: Network, morph: Morph) -> Network:
    layer = _convolution_at(network, morph)
    extra = morph.size - layer.kernel
    if extra <= 0 or extra % 2:
        raise MorphError(f"{morph}: a kernel of {layer.kernel} grows by even steps")
    changed = layer.model_copy(update={"kernel": morph.size, "padding": layer.padding + extra // 2})
    return network.with_layers({morph.at: changed})


def skip_stride(start: layers.Shape, end: layers.Shape) -> int | None:
    """Return the stride of a 1x1 convolution from ``start``'s height and width to ``end``'s; None: there is none."""
    if len(start) != 3 or len(end) != 3:
        return None
    stride = -(-start[1] // end[1])
    fits = all((side - 1) // stride + 1 == wanted for side, wanted in zip(start[1:], end[1:], strict=True))
    return stride if fits else None


def _skip_ends(network: Network, morph: Morph) -> tuple[str, layers.Shape, layers.Shape, int]:
    if morph.to is None or morph.to not in network.by_name:
        raise MorphError(f"{morph}: there is no node {morph.to!r} to skip to")
    names = list(network.by_name)
    if names.index(morph.at) >= names.index(morph.to):
        raise MorphError(f"{morph}: a skip must go forward")
    shapes = infer_shapes(network)
    start, end = shapes[morph.at], shapes[morph.to]
    stride = skip_stride(start, end)
    if stride is None:
        raise MorphError(f"{morph}: no stride takes shape {start} to {end}")
    return morph.to, start, end, stride


def _add_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    convolution = {} if start == end else {"conv": layers.Convolution(filters=end[0], kernel=1, stride=stride)}
    branch = _chain(morph, morph.at, **convolution, bn=layers.BatchNorm())
    total = Node(name=f"{morph.label}_add", layer=layers.Add(), inputs=(to, branch[-1].name))
    return network.inserted_after(to, (*branch, total), reads=total.name)


def _concat_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    if not isinstance(network.by_name[to].layer, layers.ReLU):
        raise MorphError(f"{morph}: a concat skip must join after a ReLU")
    convolution = {"conv": layers.Convolution(filters=start[0], kernel=1, stride=stride)} if stride > 1 else {}
    branch = _chain(morph, morph.at, **convolution)
    skip = branch[-1].name if branch else morph.at
    joined = Node(name=f"{morph.label}_concat", layer=layers.Concat(), inputs=(to, skip))
    fuse = layers.Convolution(filters=end[0], kernel=1, bias=True)
    fused = _chain(morph, joined.name, fuse=fuse, relu=layers.ReLU())
    return network.inserted_after(to, (*branch, joined, *fused), reads=fused[-1].name)


def _channel_groups(network: Network) -> dict[str, list[str]]:
    """Return for every node and the image the nodes that determine its channels; all of them make equally many."""
    groups = {INPUT: [INPUT]}
    for node in network.nodes:
        if isinstance(node.layer, layers.Convolution | layers.Dense | layers.Concat | layers.Flatten):
            groups[node.name] = [node.name]
            continue
        group = groups[node.name] = groups[node.inputs[0]]
        for other in (groups[source] for source in node.inputs[1:]):  # of an add
            if other is not group:
                group += other
                groups |= {name: group for name, members in groups.items() if members is other}
    return groups


def _fixed_member(network: Network, group: Iterable[str]) -> str | None:
    """Return a node of the group that cannot be widened, if any."""
    convolutions = {node.name for node in network.nodes if isinstance(node.layer, layers.Convolution)}
    return next((name for name in group if name not in convolutions), None)


def channel_group(network: Network, name: str) -> list[str]:
    """Return the convolutions that must have as many filters as ``name``: those that are added to it.

    Raises:
        MorphError: one of the group cannot be widened: the image, a concat, a dense layer or a flatten.
    """
    group = _channel_groups(network)[name]
    if (fixed := _fixed_member(network, group)) is not None:
        raise MorphError(f"{name!r} cannot be widened: it is added to {fixed!r}, whose channels are fixed")
    return group


_Bound = Annotated[int, Field(strict=True, ge=1)]


class MorphLimits(Spec):
    """Upper bounds on networks; None: unbounded.

    ``max_parameters`` and ``max_forward_operations`` (multiply-accumulates of one image, two operations each) are of
    the whole network.
    """

    max_filters: _Bound = 4096
    max_kernel: _Bound = 7
    max_nodes: _Bound = 1000
    max_parameters: _Bound | None = None
    max_forward_operations: _Bound | None = None

    def allow(self, network: Network) -> bool:
        """Return whether the whole network is within the bounds."""
        if self.max_parameters is None and self.max_forward_operations is None:
            return True
        counted = counting.count(network, "accelmark")
        return (self.max_parameters is None or counted.parameters <= self.max_parameters) and (
            self.max_forward_operations is None or counted.matrix_forward <= self.max_forward_operations
        )


class MorphChoices:
    """The morphs that one network allows, computed lazily per kind."""

    def __init__(self, network: Network, limits: MorphLimits | None = None) -> None:
        self.network: Final = network
        self.limits: Final = limits or MorphLimits()
        self._shapes = infer_shapes(network)
        self._main = main_chain(network)
        self._found: dict[MorphKind, tuple[Morph, ...]] = {}

    def of(self, kind: MorphKind) -> tuple[Morph, ...]:
        """Return all morphs of a kind in order, without labels and seeds."""
        if kind not in self._found:
            self._found[kind] = tuple(self._find(kind))
        return self._found[kind]

    def draw(self, generator: np.random.Generator, kinds: Iterable[MorphKind] = MORPH_KINDS) -> tuple[Morph, Network]:
        """Draw a kind uniformly, then one of its morphs uniformly; return it with the network that it makes.

        Raises:
            MorphError: the network allows no morph of these kinds within the limits.
        """
        remaining = list(dict.fromkeys(kinds))
        for _ in range(_DRAWS):
            if not remaining:
                break
            kind = remaining[int(generator.integers(len(remaining)))]
            if not self.of(kind):
                remaining.remove(kind)
                continue
            chosen = self.of(kind)[int(generator.integers(len(self.of(kind))))]
            seed = int(generator.integers(2**31))
            morph = chosen.model_copy(update={"label": _unused_label(self.network), "seed": seed})
            try:
                child = apply_morph(self.network, morph)
            except MorphError:
                continue
            if self.limits.allow(child):
                return morph, child
        raise MorphError(f"{self.network.name!r} allows no further morph within the limits")

    def _find(self, kind: MorphKind) -> Iterator[Morph]:
        nodes, shapes, limits = self.network.by_name, self._shapes, self.limits
        convolutions = [
            (name, layer) for name in self._main if isinstance(layer := nodes[name].layer, layers.Convolution)
        ]
        relus = [name for name in self._main if isinstance(nodes[name].layer, layers.ReLU) and len(shapes[name]) == 3]
        match kind:
            case "widen":
                groups = _channel_groups(self.network)
                for name, layer in convolutions:
                    size = 2 * layer.filters
                    if size <= limits.max_filters and _fixed_member(self.network, groups[name]) is None:
                        yield Morph(kind=kind, at=name, size=size)
            case "kernel-grow":
                for name, layer in convolutions:
                    if layer.kernel % 2 and layer.kernel + 2 <= limits.max_kernel:
                        yield Morph(kind=kind, at=name, size=layer.kernel + 2)
            case _ if len(nodes) >= limits.max_nodes:
                return
            case "deepen":
                yield from (Morph(kind=kind, at=name, size=_DEEPEN_KERNEL) for name in relus)
            case _:
                stride = cache(skip_stride)
                for start, end in combinations(relus, 2):
                    if stride(shapes[start], shapes[end]) is not None:
                        yield Morph(kind=kind, at=start, to=end)


def _unused_label(network: Network) -> str:
    used = {name.partition("_")[0] for name in network.by_name}
    return next(label for label in map("m{}".format, count(1)) if label not in used)


def with_kernel(network: Network, kernel: int) -> Network:
    """Return the network with an odd ``kernel`` in all spatial convolutions except those that read the image.

    A convolution is spatial if its kernel is above 1 and its padding ``kernel // 2``; no shape changes.
    """
    changes: dict[str, layers.Layer] = {}
    for node in network.nodes:
        layer = node.layer
        if not isinstance(layer, layers.Convolution) or layer.kernel == 1 or INPUT in node.inputs:
            continue
        if layer.padding == layer.kernel // 2:
            changes[node.name] = layer.model_copy(update={"kernel": kernel, "padding": kernel // 2})
    changed = network.with_layers(changes)
    infer_shapes(changed)
    return changed


def with_dropout(network: Network, rate: float) -> Network:
    """Return the network with all dropout at ``rate``; where there is none, one is put before the last dense layer."""
    dropouts = [node.name for node in network.nodes if isinstance(node.layer, layers.Dropout)]
    if dropouts:
        return network.with_layers(dict.fromkeys(dropouts, layers.Dropout(rate=rate)))
    nodes = list(network.nodes)
    dense = next((index for index, node in reversed([*enumerate(nodes)]) if isinstance(node.layer, layers.Dense)), None)
    if dense is not None:
        dropout = Node(name="searched_dropout", layer=layers.Dropout(rate=rate), inputs=nodes[dense].inputs)
        nodes[dense] = nodes[dense].model_copy(update={"inputs": (dropout.name,)})
        nodes.insert(dense, dropout)
    return network.with_nodes(nodes)
