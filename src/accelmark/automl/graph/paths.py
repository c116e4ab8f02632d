"""The main chain of a network and the connections that leave it: what morphs and distances look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelmark.automl.graph.layers import Add, Concat
from accelmark.automl.graph.network import INPUT, Network


@dataclass(frozen=True, slots=True)
class Skip:
    """A branch that leaves the main chain after ``start`` layers and joins it again at layer ``end``."""

    start: int
    end: int
    merge: Literal["add", "concat"]


def main_chain(network: Network) -> tuple[str, ...]:
    """Return the longest path from the picture to the output, as node names in order.

    Of two equally long paths the one through the first-listed input is taken, so the answer is one and the
    same for one network.
    """
    depth: dict[str, int] = {INPUT: 0}
    before: dict[str, str] = {}
    for node in network.nodes:
        source = max(node.inputs, key=lambda name: depth[name])
        depth[node.name] = depth[source] + 1
        before[node.name] = source
    chain = [network.output]
    while before[chain[-1]] != INPUT:
        chain.append(before[chain[-1]])
    return tuple(reversed(chain))


def skips(network: Network) -> tuple[Skip, ...]:
    """Return the branches that leave the main chain, by the places on it where they start and end."""
    place = {INPUT: 0} | {name: index + 1 for index, name in enumerate(main_chain(network))}
    origin: dict[str, int] = dict(place)
    found: list[Skip] = []
    for node in network.nodes:
        if node.name not in place:
            origin[node.name] = max(origin[source] for source in node.inputs)
            continue
        if not isinstance(node.layer, Add | Concat):
            continue
        end = place[node.name]
        on_chain = max(node.inputs, key=lambda name: place.get(name, -1))
        found.extend(Skip(origin[source], end, node.layer.kind) for source in node.inputs if source != on_chain)
    return tuple(found)
