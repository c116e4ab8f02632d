"""Classification of the nodes of a graph by relational graph attention (Busbridge et al. 2019, arXiv:1904.05811)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from typing_extensions import Self

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.images.pytorch import Classification
from accelmark.train.batches import EVALUATION_EPOCH, Arrays, Share, permutation, read_ahead, seed_of

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


def kinds_of(relations: Iterable[Relation]) -> list[str]:
    """Return the types of nodes at the ends of relations, sorted."""
    return sorted({end for relation in relations for end in (relation.source, relation.target)})


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

    def node_arrays(self) -> Arrays:
        """Return the ids of the nodes as ``<type>.<hop>``."""
        return {f"{kind}.{hop}": ids for kind, hops in self.nodes.items() for hop, ids in enumerate(hops)}


def sample_neighbourhood(
    graph: Mapping[Relation, Incoming],
    counts: Mapping[str, int],
    seeds: Ids,
    kind: str,
    fan_out: Sequence[int],
    random: np.random.Generator,
) -> Neighbourhood:
    """Return the neighbourhood of ``seeds``, different nodes of type ``kind``; the graph has ``counts[kind]`` of them.

    In hop h, at most ``fan_out[h]`` edges of each relation are drawn into each node that hop h found first
    (Hamilton et al. 2017, arXiv:1706.02216, algorithm 2).
    """
    kinds = kinds_of(graph)
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
    kinds = kinds_of(relations)
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


_SYNTHETIC_NEIGHBOURS: Final = 2


class RelationalAttention(nn.Module):
    """Graph attention over the edges of each relation, added up for each node."""

    def __init__(self, relations: Sequence[Relation], inner: int, width: int, heads: int) -> None:
        super().__init__()
        attention = {str(each): GATConv(inner, width // heads, heads, add_self_loops=False) for each in relations}
        self.attention = nn.ModuleDict(attention)

    def forward(self, nodes: Mapping[str, Tensor], targets: Mapping[str, int], edges: Batch, hops: int) -> Batch:
        """Return new features of the first ``targets[type]`` nodes of each type after the edges of ``hops`` hops."""
        found: dict[str, Tensor] = {}
        for name, attend in self.attention.items():
            source, _, target = Relation.parse(name)
            ends = torch.cat([edges[f"{name}.{hop}"] for hop in range(hops)], 1)
            given = attend((nodes[source], nodes[target][: targets[target]]), ends)
            found[target] = found[target] + given if target in found else given
        return found


class NodeClassifier(nn.Module):
    """Layers of relational attention over a sampled neighbourhood, and logits for its seeds.

    Only those relations have weights in a layer that the logits depend on: in the last one, those that lead to seeds.
    A layer computes the nodes that the layers after it need.
    """

    def __init__(self, relations: Sequence[Relation], kind: str, sizes: Sequence[int], heads: int, hops: int) -> None:
        super().__init__()
        inner, width, classes = sizes
        self.kind, needed, layers = kind, {kind}, []
        for layer in reversed(range(hops)):
            used = [relation for relation in relations if relation.target in needed]
            layers.append(RelationalAttention(used, width if layer else inner, width, heads))
            needed |= {each.source for each in used}
        self.kinds, self.layers = sorted(needed), nn.ModuleList(reversed(layers))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, classes)

    def forward(self, batch: Batch) -> Tensor:
        """Return a logit for each class of each seed; ``batch`` is as :meth:`LabelledGraph.read` returns it."""
        hops = len(self.layers)
        sizes = {kind: [len(batch[f"{kind}.{hop}"]) for hop in range(hops + 1)] for kind in self.kinds}
        parts = {kind: [batch[f"{kind}.{hop}"] for hop in range(hops + 1)] for kind in self.kinds}
        nodes = {kind: torch.cat(found).to(self.head.weight.dtype) for kind, found in parts.items()}
        for layer, attend in enumerate(self.layers):
            within = hops - layer
            targets = {kind: sum(found[:within]) for kind, found in sizes.items()}
            nodes = attend(nodes, targets, batch, within)
            if within > 1:
                nodes = {kind: self.dropout(F.leaky_relu(found)) for kind, found in nodes.items()}
        logits: Tensor = self.head(nodes[self.kind])
        return logits


@dataclass(frozen=True)
class LabelledGraph:
    """Edges, features of each type's nodes, and the classes of the nodes of one type; arrays may be memory-mapped."""

    where: str
    """File or directory, for messages."""
    edges: Mapping[Relation, Incoming]
    features: Mapping[str, npt.NDArray[Any]]
    labels: npt.NDArray[Any]

    def read(self, seeds: Ids, kind: str, fan_out: Sequence[int], random: np.random.Generator, classes: int) -> Arrays:
        """Return a sampled neighbourhood and ``label`` of the seeds; raises DataError for a damaged graph."""
        if len(wrong := seeds[seeds >= len(self.labels)]):
            raise DataError(f"{self.where}: node {wrong[0]} is to be classified; {kind!r} has {len(self.labels)} nodes")
        counts = {each: len(features) for each, features in self.features.items()}
        with raising(DataError, f"{self.where}", DataError):
            trees = sample_neighbourhood(self.edges, counts, seeds, kind, fan_out, random)
        labels = np.asarray(self.labels[seeds], np.float64)
        if len(wrong := seeds[~((labels >= 0) & (labels < classes))]):
            raise DataError(f"{self.where}: node {wrong[0]} of type {kind!r} has no class from 0 to {classes - 1}")
        found = {name: self.features[name.rpartition(".")[0]][ids] for name, ids in trees.node_arrays().items()}
        return {**found, **trees.edge_arrays(), "label": labels.astype(np.int64)}


class NeighbourhoodBatches:
    """Batches of seeds with their neighbourhoods; ``loader.num_workers`` threads read them ahead."""

    def __init__(
        self, case: NodeClassification, graph: LabelledGraph, seeds: Ids, batch_size: int, *, train: bool
    ) -> None:
        self._case, self._graph, self._seeds = case, graph, seeds
        place = case.place
        self._share = Share(len(seeds), batch_size, place, train)
        self.num_samples = self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's batches; neighbourhoods follow from seed, epoch, rank and batch only."""
        case, loader = self._case, self._case.settings.loader
        place, epoch = case.place, number if self._share.train else EVALUATION_EPOCH

        def read(numbered: tuple[int, Ids]) -> Arrays:
            batch, indices = numbered
            random = np.random.default_rng(seed_of(place.shared_seed, epoch, batch, place.rank))
            seeds = self._seeds[indices]
            return self._graph.read(seeds, case.kind, case.numbers("fan_out"), random, case.number("num_classes"))

        batches = enumerate(self._share.indices(permutation, epoch, skip), skip)
        for arrays in read_ahead(read, batches, loader):
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}


class NodeClassification(Classification):
    """Classification of nodes by sampled neighbourhoods; not all tensors of a batch have a row for each sample.

    ``fan_out`` under ``model`` is the number of edges of each relation that are drawn into a node, for each layer.
    """

    accuracies = {"accuracy": 1}  # noqa: RUF012 - a class variable of the base
    block_class = "RelationalAttention"
    samples: ClassVar[str]
    """Name of the data set."""
    kind: ClassVar[str]
    """Type of the nodes that have classes."""
    relations: ClassVar[Sequence[str]]

    @property
    def parsed(self) -> list[Relation]:
        """The relations of the graph."""
        return [Relation.parse(relation) for relation in self.relations]

    @cached_property
    def graph(self) -> LabelledGraph:
        """The graph in MLPerf's layout, memory-mapped; raises DataError where files are damaged or do not fit.

        For each relation it has ``CSC/<relation>/indptr.pt`` and ``indices.pt``, for each type of nodes
        ``<type>/node_feat_fp16.pt``, and ``<kind>/node_label_2K.npy``: fp32 numbers of classes, with or without header.
        """
        directory, width = self.data_dirs[self.samples], self.number("num_features")
        features = {each: read_array(directory / each / "node_feat_fp16.pt", 2) for each in kinds_of(self.parsed)}
        path = directory / self.kind / "node_label_2K.npy"
        with raising(DataError, f"{path}: cannot be read as an array", OSError, ValueError):
            with path.open("rb") as file:
                has_header = file.read(6) == b"\x93NUMPY"
            labels: npt.NDArray[Any] = np.load(path, mmap_mode="r") if has_header else np.memmap(path, np.float32, "r")
        edges, sizes = {}, [(path, len(labels), len(features[self.kind]), "nodes")]
        for each, rows in features.items():
            sizes.append((directory / each / "node_feat_fp16.pt", rows.shape[1], width, "features of the model"))
        for relation in self.parsed:
            folder = directory / "CSC" / str(relation)
            incoming = edges[relation] = Incoming(read_array(folder / "indptr.pt"), read_array(folder / "indices.pt"))
            num_starts = len(features[relation.target]) + 1
            sizes.append((folder / "indptr.pt", len(incoming.starts), num_starts, "nodes and 1"))
            sizes.append((folder / "indices.pt", len(incoming.sources), int(incoming.starts[-1]), "edges of indptr.pt"))
        for path, found, expected, what in sizes:
            if found != expected:
                raise DataError(f"{path}: has {found} entries; expected {expected}, as many as {what}")
        return LabelledGraph(str(directory), edges, features, labels)

    def dataset(self, *, train: bool) -> Ids:
        """Return the ids of the nodes that are classified in training or in evaluation, of ``split_seeds.py``."""
        return read_array(self.data_dirs[self.samples] / f"{'train' if train else 'val'}_idx.pt")

    def build_model(self) -> nn.Module:
        sizes = [self.number(name) for name in ("num_features", "hidden_size", "num_classes")]
        return NodeClassifier(self.parsed, self.kind, sizes, self.number("num_heads"), len(self.numbers("fan_out")))

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch)
        return logits

    def _batches(self, data: Any, size: int, *, train: bool) -> NeighbourhoodBatches:
        return NeighbourhoodBatches(self, self.graph, data, size, train=train)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random features and classes; each node of the neighbourhoods has two edges of each relation."""
        random, width = generator_for(self.place.seed), self.number("num_features")
        trees = synthetic_trees(self.parsed, self.kind, size, self.numbers("fan_out"), _SYNTHETIC_NEIGHBOURS)
        return {
            **{name: torch.randn(len(ids), width, generator=random) for name, ids in trees.node_arrays().items()},
            **{name: torch.from_numpy(array) for name, array in trees.edge_arrays().items()},
            "label": torch.randint(0, self.number("num_classes"), (size,), generator=random),
        }


def read_array(path: Path, dimensions: int = 1) -> npt.NDArray[Any]:
    """Return a tensor of ``torch.save``, memory-mapped; raises DataError with the file where it is not a tensor."""
    with raising(DataError, f"{path}: cannot be read as a tensor", *UNREADABLE, pickle.UnpicklingError):
        tensor = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != dimensions:
        raise DataError(f"{path}: expected a tensor of {dimensions} dimensions")
    return tensor.numpy()
