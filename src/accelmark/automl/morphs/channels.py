"""Which layers share their channels, and where each channel of a widened network came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.graph import INPUT, Add, Concat, Convolution, Dense, Flatten, Network, infer_shapes
from accelmark.automl.morphs.morph import MorphError


@dataclass(frozen=True, slots=True)
class Origin:
    """For every channel of a tensor in the wider network: its old channel, and its share of the old weight.

    The shares of all copies of one old channel sum to 1, so a reader whose weights are multiplied by them
    computes what it did before. Unequal shares keep the copies from learning the same thing.
    """

    channel: NDArray[np.intp]
    share: NDArray[np.float64]

    @staticmethod
    def unchanged(count: int) -> Origin:
        """Every channel is itself."""
        return Origin(np.arange(count), np.ones(count))


def channel_leaders(network: Network) -> Mapping[str, str]:
    """Return for every node (and the picture) one node that stands for all whose channels must be its own."""
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
        if isinstance(node.layer, Add):
            for source in node.inputs[1:]:
                leader[find(source)] = find(node.inputs[0])
    return {name: find(name) for name in leader}


def channel_group(network: Network, name: str, leaders: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the convolutions that must have as many filters as ``name``: those added to it, directly or not.

    Raises MorphError when the group holds something that cannot be widened: the picture, a concat, a flatten.
    """
    groups = leaders or channel_leaders(network)
    members = [other for other in groups if groups[other] == groups[name] and _makes_channels(network, other)]
    for member in members:
        if member == INPUT or not isinstance(network.by_name[member].layer, Convolution):
            raise MorphError(f"{name!r} cannot be widened: it is added to {member!r}, whose channels are fixed")
    return tuple(members)


def _makes_channels(network: Network, name: str) -> bool:
    """Tell whether a node makes channels of its own rather than passing on its input's."""
    return name == INPUT or isinstance(network.by_name[name].layer, Convolution | Dense | Concat | Flatten)


def doubled(count: int, size: int, generator: np.random.Generator) -> Origin:
    """Return how ``count`` channels become ``size``: all of them once, then randomly chosen copies."""
    copies = generator.integers(0, count, size=size - count) if size - count != count else np.arange(count)
    channel = np.concatenate([np.arange(count), copies])
    weight = generator.uniform(0.5, 1.5, size=size)
    total = np.bincount(channel, weights=weight, minlength=count)
    return Origin(channel, weight / total[channel])


def origins(network: Network, group: tuple[str, ...], widened: Origin) -> Mapping[str, Origin]:
    """Return the origin of every node's output channels when all of ``group`` is widened alike."""
    shapes = infer_shapes(network)
    found: dict[str, Origin] = {INPUT: Origin.unchanged(network.input_shape[0])}
    for node in network.nodes:
        sources = [found[source] for source in node.inputs]
        match node.layer:
            case Convolution() | Dense():
                chosen = node.name in group
                found[node.name] = widened if chosen else Origin.unchanged(shapes[node.name][0])
            case Concat():
                found[node.name] = _side_by_side(sources, [shapes[source][0] for source in node.inputs])
            case Flatten():
                found[node.name] = _spread(sources[0], shapes[node.inputs[0]])
            case _:
                found[node.name] = sources[0]
    return found


def _side_by_side(sources: list[Origin], counts: list[int]) -> Origin:
    starts = np.cumsum([0, *counts[:-1]])
    return Origin(
        np.concatenate([source.channel + start for source, start in zip(sources, starts, strict=True)]),
        np.concatenate([source.share for source in sources]),
    )


def _spread(source: Origin, shape: tuple[int, ...]) -> Origin:
    places = int(np.prod(shape[1:], dtype=np.int64))
    channel = source.channel[:, None] * places + np.arange(places)[None, :]
    return Origin(channel.reshape(-1), np.repeat(source.share, places))
