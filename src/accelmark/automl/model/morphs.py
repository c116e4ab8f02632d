"""Morphs: changes of a network's structure, which of them a network allows, and searched settings written into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from accelmark.automl.model import layers
from accelmark.automl.model.counting import count
from accelmark.automl.model.network import (
    INPUT,
    Network,
    NetworkError,
    Node,
    find_problems,
    infer_shapes,
    main_chain,
)
from accelmark.spec.errors import AccelmarkError

MorphKind = Literal["deepen", "widen", "add-skip", "concat-skip", "kernel-grow"]
MORPH_KINDS: Final[tuple[MorphKind, ...]] = get_args(MorphKind)
_DRAWS: Final = 60
_DEEPEN_KERNEL: Final = 3


class MorphError(AccelmarkError):
    """A morph that the network does not allow."""


class Morph(BaseModel):
    """One change of a network.

    at     the node it starts from: the ReLU after which to deepen or from which a skip leaves, or the convolution to
           widen or whose kernel to grow
    to     the node where a skip joins the main chain
    size   the new kernel (deepen, kernel-grow) or the new number of filters (widen)
    label  prefix of the names of inserted nodes
    seed   of all random choices: which filters are copied, how weights are split, initial weights of new layers
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def _chain(morph: Morph, source: str, *layers: tuple[str, layers.Layer]) -> tuple[Node, ...]:
    """Return new nodes named after the morph, each reading the one before it and the first one ``source``."""
    names = [f"{morph.label}_{suffix}" for suffix, _ in layers]
    sources = [source, *names]
    return tuple(
        Node(name=name, layer=layer, inputs=(before,))
        for name, before, (_, layer) in zip(names, sources, layers, strict=False)
    )


def _deepen(network: Network, morph: Morph) -> Network:
    if not isinstance(network.by_name[morph.at].layer, layers.ReLU) or morph.size % 2 == 0:
        raise MorphError(f"{morph}: deepening needs a ReLU and an odd kernel")
    channels = infer_shapes(network)[morph.at][0]
    convolution = layers.Convolution(filters=channels, kernel=morph.size, padding=morph.size // 2)
    added = _chain(morph, morph.at, ("conv", convolution), ("bn", layers.BatchNorm()), ("relu", layers.ReLU()))
    return network.inserted_after(morph.at, added, reads=added[-1].name)


def _widen(network: Network, morph: Morph) -> Network:
    layer = _convolution_at(network, morph)
    if morph.size <= layer.filters:
        raise MorphError(f"{morph}: the convolution has {layer.filters} filters already")
    members = {name: network.by_name[name].layer for name in channel_group(network, morph.at)}
    return network.with_layers({name: one.model_copy(update={"filters": morph.size}) for name, one in members.items()})


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
    if network.position[morph.at] >= network.position[morph.to]:
        raise MorphError(f"{morph}: a skip must go forward")
    shapes = infer_shapes(network)
    start, end = shapes[morph.at], shapes[morph.to]
    stride = skip_stride(start, end)
    if stride is None:
        raise MorphError(f"{morph}: no stride takes shape {start} to {end}")
    return morph.to, start, end, stride


def _add_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    convolution = [] if start == end else [("conv", layers.Convolution(filters=end[0], kernel=1, stride=stride))]
    branch = _chain(morph, morph.at, *convolution, ("bn", layers.BatchNorm()))
    total = Node(name=f"{morph.label}_add", layer=layers.Add(), inputs=(to, branch[-1].name))
    return network.inserted_after(to, (*branch, total), reads=total.name)


def _concat_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    if not isinstance(network.by_name[to].layer, layers.ReLU):
        raise MorphError(f"{morph}: a concat skip must join after a ReLU")
    convolution = [("conv", layers.Convolution(filters=start[0], kernel=1, stride=stride))] if stride > 1 else []
    branch = _chain(morph, morph.at, *convolution)
    joined = Node(
        name=f"{morph.label}_concat", layer=layers.Concat(), inputs=(to, branch[-1].name if branch else morph.at)
    )
    fuse = layers.Convolution(filters=end[0], kernel=1, bias=True)
    fused = _chain(morph, joined.name, ("fuse", fuse), ("relu", layers.ReLU()))
    return network.inserted_after(to, (*branch, joined, *fused), reads=fused[-1].name)


def _makes_channels(network: Network, name: str) -> bool:
    """Return whether a node has its own number of output channels instead of its input's."""
    return name == INPUT or isinstance(
        network.by_name[name].layer, layers.Convolution | layers.Dense | layers.Concat | layers.Flatten
    )


def channel_leaders(network: Network) -> Mapping[str, str]:
    """Return for every node and the image one representative of all nodes that must have as many channels."""
    leader: dict[str, str] = {INPUT: INPUT}

    def find(node: str) -> str:
        while leader[node] != node:
            node = leader[node]
        return node

    for node in network.nodes:
        if _makes_channels(network, node.name):
            leader[node.name] = node.name
            continue
        leader[node.name] = find(node.inputs[0])
        if isinstance(node.layer, layers.Add):
            for source in node.inputs[1:]:
                leader[find(source)] = find(node.inputs[0])
    return {name: find(name) for name in leader}


def channel_group(network: Network, name: str, leaders: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the convolutions that must have as many filters as ``name``: those that are added to it.

    Raises:
        MorphError: one of the group cannot be widened: the image, a concat, a dense layer or a flatten.
    """
    groups = leaders or channel_leaders(network)
    members = [other for other in groups if groups[other] == groups[name] and _makes_channels(network, other)]
    for member in members:
        if member == INPUT or not isinstance(network.by_name[member].layer, layers.Convolution):
            raise MorphError(f"{name!r} cannot be widened: it is added to {member!r}, whose channels are fixed")
    return tuple(members)


@dataclass(frozen=True, slots=True)
class MorphLimits:
    """Upper bounds on networks; None: unbounded.

    ``max_parameters`` and ``max_forward_operations`` (multiply-accumulates of one image, two operations each) are of
    the whole network.
    """

    max_filters: int = 4096
    max_kernel: int = 7
    max_nodes: int = 1000
    max_parameters: int | None = None
    max_forward_operations: int | None = None

    def allow(self, network: Network) -> bool:
        """Return whether the whole network is within the bounds."""
        if self.max_parameters is None and self.max_forward_operations is None:
            return True
        counted = count(network, "accelmark")
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

    def draw(self, generator: np.random.Generator, kinds: Iterable[MorphKind]) -> tuple[Morph, Network]:
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
        if kind == "widen":
            return self._widenings()
        convolutions, limit = self._convolutions(), self.limits.max_kernel
        if kind == "kernel-grow":
            grown = ((name, layer.kernel + 2) for name, layer in convolutions if layer.kernel % 2)
            return (Morph(kind=kind, at=name, size=size) for name, size in grown if size <= limit)
        if len(self.network.nodes) >= self.limits.max_nodes:
            return iter(())
        if kind == "deepen":
            return (Morph(kind=kind, at=name, size=_DEEPEN_KERNEL) for name in self._relus())
        return self._skips(kind)

    def _convolutions(self) -> Iterator[tuple[str, layers.Convolution]]:
        for name in self._main:
            if isinstance(layer := self.network.by_name[name].layer, layers.Convolution):
                yield name, layer

    def _relus(self) -> list[str]:
        nodes = self.network.by_name
        return [
            name for name in self._main if isinstance(nodes[name].layer, layers.ReLU) and len(self._shapes[name]) == 3
        ]

    def _widenings(self) -> Iterator[Morph]:
        leaders = channel_leaders(self.network)
        for name, layer in self._convolutions():
            if 2 * layer.filters <= self.limits.max_filters:
                try:
                    channel_group(self.network, name, leaders)
                except MorphError:
                    continue
                yield Morph(kind="widen", at=name, size=2 * layer.filters)

    def _skips(self, kind: MorphKind) -> Iterator[Morph]:
        relus, shapes = self._relus(), self._shapes
        fits: dict[tuple[layers.Shape, layers.Shape], bool] = {}
        for index, start in enumerate(relus):
            for end in relus[index + 1 :]:
                pair = (shapes[start], shapes[end])
                if pair not in fits:
                    fits[pair] = skip_stride(*pair) is not None
                if fits[pair]:
                    yield Morph(kind=kind, at=start, to=end)


def random_morph(
    network: Network,
    generator: np.random.Generator,
    *,
    kinds: Iterable[MorphKind] = MORPH_KINDS,
    limits: MorphLimits | None = None,
) -> tuple[Morph, Network]:
    """Draw one morph (see :meth:`MorphChoices.draw`); return it with the network that it makes."""
    return MorphChoices(network, limits).draw(generator, kinds)


def _unused_label(network: Network) -> str:
    used = {name.partition("_")[0] for name in network.by_name}
    number = 1
    while f"m{number}" in used:
        number += 1
    return f"m{number}"


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
    last = next((node for node in reversed(network.nodes) if isinstance(node.layer, layers.Dense)), None)
    nodes: list[Node] = []
    for node in network.nodes:
        if node is last:
            nodes.append(Node(name="searched_dropout", layer=layers.Dropout(rate=rate), inputs=node.inputs))
            node = node.model_copy(update={"inputs": ("searched_dropout",)})
        nodes.append(node)
    return network.with_nodes(nodes)
