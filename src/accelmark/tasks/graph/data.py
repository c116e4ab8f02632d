"""Neighbourhoods of nodes in a graph whose nodes and edges have types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from accelmark.spec.errors import DataError
from accelmark.train.batches import Arrays

Ids = npt.NDArray[np.int64]


class Relation(NamedTuple):
    """A type of edges, from nodes of one type to nodes of another; as text ``paper__cites__paper``."""

    source: str
    name: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the relation that ``text`` names."""
        return cls(*text.split("__"))

    def __str__(self) -> str:
        return "__".join(self)


@final
@dataclass(frozen=True)
class Incoming:
    """The edges of a relation by target: those into node i come from ``sources[starts[i]:starts[i + 1]]``."""

    starts: npt.NDArray[Any]
    sources: npt.NDArray[Any]

    def draw(self, targets: Ids, most: int, random: np.random.Generator) -> tuple[Ids, Ids]:
        """Return at most ``most`` edges into each target, drawn without replacement: sources, and places of targets."""
        begin = self.starts[targets].astype(np.int64)
        degree = self.starts[targets + 1].astype(np.int64) - begin
        chosen = np.tile(np.arange(most), (len(targets), 1))
        (many,) = np.nonzero(degree > most)
        # Floyd's algorithm (Bentley & Floyd 1987, "A sample of brilliance"), for all targets with more edges at once.
        for place in range(most):
            last = degree[many] - most + place
            drawn = random.integers(0, last + 1)
            repeated = (chosen[many, :place] == drawn[:, None]).any(1)
            chosen[many, place] = np.where(repeated, last, drawn)
        rows, columns = np.nonzero(np.arange(most) < degree[:, None])
        return self.sources[begin[rows] + chosen[rows, columns]].astype(np.int64), rows


@final
@dataclass(frozen=True)
class Neighbourhood:
    """Sampled nodes and edges around seeds, by hop.

    ``nodes[type][hop]`` are the ids of the nodes that were first found in that hop, seeds in hop 0.
    ``edges[relation][hop]``, of shape (2, edges), has the places of sources and targets in the nodes of all hops; its
    targets were found in hop ``hop``, their sources up to the next one.
    """

    nodes: Mapping[str, Sequence[Ids]]
    edges: Mapping[Relation, Sequence[Ids]]

    def edge_arrays(self) -> Arrays:
        """Return the edges as ``<relation>.<hop>``."""
        return {f"{relation}.{hop}": ends for relation, hops in self.edges.items() for hop, ends in enumerate(hops)}

    def features(self, of: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return the features of the nodes as ``<type>.<hop>``, those of all nodes of a type being ``of[type]``."""
        return {f"{kind}.{hop}": of[kind][ids] for kind, hops in self.nodes.items() for hop, ids in enumerate(hops)}


def sample_neighbourhood(
    graph: Mapping[Relation, Incoming],
    counts: Mapping[str, int],
    seeds: Ids,
    kind: str,
    fan_out: Sequence[int],
    random: np.random.Generator,
) -> Neighbourhood:
    """Return the neighbourhood of ``seeds``, different nodes of type ``kind``, of which there are ``counts[kind]``.

    In hop h, at most ``fan_out[h]`` edges of each relation are drawn into each node that hop h found first
    (Hamilton et al. 2017, arXiv:1706.02216, algorithm 2).
    """
    kinds = sorted({end for relation in graph for end in (relation.source, relation.target)})
    nodes = {each: [seeds if each == kind else np.empty(0, np.int64)] for each in kinds}
    edges: dict[Relation, list[Ids]] = {relation: [] for relation in graph}
    for most in fan_out:
        drawn = {relation: graph[relation].draw(nodes[relation.target][-1], most, random) for relation in graph}
        known = {each: np.concatenate(hops) for each, hops in nodes.items()}
        first = {each: len(known[each]) - len(hops[-1]) for each, hops in nodes.items()}
        for each in kinds:
            sources = [ids for relation, (ids, _) in drawn.items() if relation.source == each]
            new = np.setdiff1d(np.concatenate(sources), known[each]) if sources else np.empty(0, np.int64)
            if (greatest := new.max(initial=-1)) >= counts[each]:
                raise DataError(f"an edge comes from node {greatest} of type {each!r}, which has {counts[each]}")
            nodes[each].append(new)
            known[each] = np.concatenate([known[each], new])
        order = {each: np.argsort(ids) for each, ids in known.items()}
        for relation, (ids, targets) in drawn.items():
            source = relation.source
            places = order[source][np.searchsorted(known[source], ids, sorter=order[source])]
            edges[relation].append(np.stack([places, targets + first[relation.target]]))
    return Neighbourhood(nodes, edges)


def synthetic_trees(
    relations: Sequence[Relation], kind: str, count: int, fan_out: Sequence[int], degree: int
) -> Neighbourhood:
    """Return a neighbourhood of ``count`` seeds in which each edge comes from another node.

    Into each node lead ``degree`` edges of each relation, or as many as ``fan_out`` allows.
    """
    kinds = sorted({end for relation in relations for end in (relation.source, relation.target)})
    sizes = {each: [count if each == kind else 0] for each in kinds}
    edges: dict[Relation, list[Ids]] = {relation: [] for relation in relations}
    for most in fan_out:
        new, drawn = dict.fromkeys(kinds, 0), min(most, degree)
        for relation in relations:
            numbers = np.arange(sizes[relation.target][-1] * drawn)
            sources = sum(sizes[relation.source]) + new[relation.source] + numbers
            edges[relation].append(np.stack([sources, sum(sizes[relation.target][:-1]) + numbers // drawn]))
            new[relation.source] += len(numbers)
        for each in kinds:
            sizes[each].append(new[each])
    return Neighbourhood({each: [np.arange(size) for size in numbers] for each, numbers in sizes.items()}, edges)
