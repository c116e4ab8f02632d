"""RGAT on IGBH-Full in PyTorch."""

from __future__ import annotations

from accelmark.tasks.graph.data import Ids
from accelmark.tasks.graph.pytorch import LabelledGraph, NodeClassification, read_array, read_graph


class Case(NodeClassification):
    """RGAT of MLPerf Training: the topic of papers from citations, authors, institutes, fields and venues."""

    samples = "igbh"
    kind = "paper"
    relations = (
        "paper__cites__paper",
        "paper__written_by__author",
        "author__affiliated_to__institute",
        "paper__topic__fos",
        "author__rev_written_by__paper",
        "institute__rev_affiliated_to__author",
        "fos__rev_topic__paper",
        "paper__published__journal",
        "paper__venue__conference",
        "journal__rev_published__paper",
        "conference__rev_venue__paper",
    )

    def graph(self) -> LabelledGraph:
        """Return the graph, memory-mapped."""
        return read_graph(self.data_dirs[self.samples], self.relations, self.kind, self.number("num_features"))

    def seeds(self, *, train: bool) -> Ids:
        """Return the papers of MLPerf's ``split_seeds.py``."""
        return read_array(self.data_dirs[self.samples] / f"{'train' if train else 'val'}_idx.pt")
