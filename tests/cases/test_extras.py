"""Families whose libraries are extras: latents that are read by offset, and neighbourhoods that are sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.tiny_data import npy, tar

pytest.importorskip("pyarrow")
pytest.importorskip("diffusers")
pytest.importorskip("torch_geometric")
from accelmark.cases.graph_mini.pytorch import nearest
from accelmark.tasks.generation.pytorch import CaptionedLatents, EncodedRows
from accelmark.tasks.graph.pytorch import Incoming, Relation, sample_neighbourhood, synthetic_trees

SHAPE = 8, 2, 2


def test_samples_of_all_shards_are_read_in_order(tmp_path: Path) -> None:
    one, two = (npy(np.full(SHAPE, value, np.float16)) for value in (1, 2))
    tar(tmp_path / "00001.tar", {"7.txt": b"two dogs\n", "7.npy": two})
    tar(tmp_path / "00000.tar", {"a/3.npy": one, "a/3.txt": b"a cat", "a/3.json": b"{}"})
    latents = CaptionedLatents(tmp_path)
    found = [latents.read(index, SHAPE) for index in range(len(latents))]
    assert [(float(array.mean()), caption) for array, caption in found] == [(1, "a cat"), (2, "two dogs")]


def test_rows_of_several_arrow_files_are_read_by_their_number(tmp_path: Path) -> None:
    folder = tiny_data.flux_encodings(tmp_path)["flux_encodings"] / "val"
    found = EncodedRows(folder, {"mean": (16, 8, 8), "clip_encodings": (12,)}, ("timestep",))
    if Path("/proc/self/fd").is_dir():
        assert not any(each.resolve().suffix == ".arrow" for each in Path("/proc/self/fd").iterdir())
    rows = [found.read(index) for index in range(len(found))]
    assert [row["timestep"] for row in rows] == list(range(8))
    for row in rows:
        assert row["mean"].shape == (16, 8, 8)
        assert sorted(row["clip_encodings"].tolist()) == [0] * 11 + [0x4080], "4 in bf16"


CITES, WRITTEN = Relation("paper", "cites", "paper"), Relation("author", "wrote", "paper")


def incoming(*sources: list[int]) -> Incoming:
    starts = np.cumsum([0, *map(len, sources)])
    return Incoming(starts, np.array([each for part in sources for each in part]))


def test_edges_are_drawn_evenly_and_without_repetition() -> None:
    random = np.random.default_rng(0)
    edges = incoming(list(range(10, 20)), [], [5, 6])
    counts = np.zeros(20)
    for _ in range(2000):
        sources, targets = edges.draw(np.array([2, 0, 1]), 3, random)
        assert targets.tolist() == [0, 0, 1, 1, 1]
        assert sources[:2].tolist() == [5, 6]
        assert len(set(sources[2:].tolist())) == 3
        counts[sources[2:]] += 1
    assert counts[10:20] == pytest.approx(np.full(10, 600), rel=0.15)


def test_a_neighbourhood_has_each_node_once_and_edges_between_the_right_nodes() -> None:
    graph = {CITES: incoming([1, 2], [0], [0, 3], []), WRITTEN: incoming([0], [0, 1], [2], [1])}
    found = sample_neighbourhood(
        graph, {"paper": 4, "author": 3}, np.array([0, 2]), "paper", [2, 2], np.random.default_rng(0)
    )
    assert [ids.tolist() for ids in found.nodes["paper"]] == [[0, 2], [1, 3], []]
    assert [ids.tolist() for ids in found.nodes["author"]] == [[], [0, 2], [1]]
    papers, authors = (np.concatenate(found.nodes[kind]) for kind in ("paper", "author"))
    for hop, targets in enumerate(([0, 2], [1, 3])):
        for relation, ids in ((CITES, papers), (WRITTEN, authors)):
            edges = found.edges[relation][hop]
            ends = {(int(ids[source]), int(papers[target])) for source, target in edges.T}
            starts, sources = graph[relation].starts, graph[relation].sources
            assert ends == {(int(one), node) for node in targets for one in sources[starts[node] : starts[node + 1]]}


def test_edges_lead_from_the_nearest_points_and_from_the_point_itself() -> None:
    found = nearest(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [9.0, 9.0]]), 2)
    assert found.starts.tolist() == [0, 3, 6, 9, 12]
    assert found.sources.reshape(4, 3).tolist() == [[0, 2, 1], [1, 2, 0], [2, 0, 1], [3, 1, 2]]


def test_synthetic_trees_have_the_shapes_of_a_sampled_neighbourhood() -> None:
    found = synthetic_trees([CITES, WRITTEN], "paper", 3, [4, 1], 2)
    assert {kind: [len(ids) for ids in hops] for kind, hops in found.nodes.items()} == {
        "author": [0, 6, 6],
        "paper": [3, 6, 6],
    }
    for relation, hops in found.edges.items():
        sources = np.concatenate(hops, 1)[0]
        assert len(set(sources.tolist())) == len(sources)
        assert sources.max() < sum(map(len, found.nodes[relation.source]))
        assert [sorted(set(ends[1].tolist())) for ends in hops] == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]


def test_logits_depend_on_the_last_hop_and_on_every_weight() -> None:
    case = case_of("rgat", {**SMALL["rgat"], "model.fan_out": "3,2,2"})
    model, batch = case.build_model().eval(), case.synthetic_batch(2)
    logits = model(batch)
    assert not torch.allclose(logits, model({**batch, "paper.3": batch["paper.3"] + 1}))
    torch.autograd.backward(logits.sum())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_neighbourhoods_follow_from_seed_epoch_and_rank(tmp_path: Path) -> None:
    case = case_of("rgat", {**SMALL["rgat"], "model.num_classes": 2, "batch_size": 8, "loader.num_workers": 2})
    case.data_dirs = tiny_data.igbh(tmp_path)
    batches = case.train_batches()
    first, again, later = (list(batches.epoch(epoch)) for epoch in (0, 0, 1))
    assert len(first) == 6
    assert all(torch.equal(one[name], other[name]) for one, other in zip(first, again, strict=True) for name in one)
    assert not torch.equal(first[0]["label"], later[0]["label"]) or len(first[0]["paper.1"]) != len(later[0]["paper.1"])
