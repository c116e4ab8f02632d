"""Relational graph attention over neighbours of Fashion-MNIST's images in PyTorch."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from accelmark.cases.resnet_mini._fashion import MEAN, SIDE, STD, read_split
from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.spec.backports import zip_strict
from accelmark.tasks.graph.pytorch import Ids, Incoming, LabelledGraph, NodeClassification

_ROWS = 1000
"""Images that are compared with all others at once."""


def nearest(points: Tensor, count: int) -> Incoming:
    """Return edges into each point, of shape (points, features), from itself and the ``count`` nearest others."""
    squares = points.square().sum(1)
    distances = (squares - 2 * part @ points.T for part in torch.split(points, _ROWS))
    indices = torch.cat([torch.topk(distance, count + 1, largest=False).indices for distance in distances])
    return Incoming(np.arange(len(points) + 1) * (count + 1), indices.flatten().numpy())


class Case(NodeClassification):
    """The class of an image from some of its pixels, and from images with similar upper and lower halves."""

    samples = "fashion_mnist"
    kind = "image"
    relations = ("image__upper__image", "image__lower__image")

    @cached_property
    def graph(self) -> LabelledGraph:
        """The graph of the first images of both splits; it does not depend on the seed."""
        counts = self.number("train_images"), self.number("eval_images")
        parts = [read_split(self.data_dirs[self.samples], "train"), read_split(self.data_dirs[self.samples], "test")]
        images, labels = (
            np.concatenate([part[:count] for part, count in zip_strict(each, counts)]) for each in zip_strict(*parts)
        )
        pixels = torch.from_numpy((images.reshape(-1, SIDE, SIDE) - MEAN) / STD).float()
        small = F.avg_pool2d(pixels, 2).flatten(1)
        edges = [nearest(half, self.number("num_neighbours")) for half in small.chunk(2, 1)]
        seen = torch.rand(len(pixels), SIDE * SIDE, generator=generator_for(0)) < self.real("visible_share")
        features = (pixels.flatten(1) * seen).numpy()
        where = str(self.data_dirs[self.samples])
        return LabelledGraph(where, dict(zip_strict(self.parsed, edges)), {self.kind: features}, labels)

    def dataset(self, *, train: bool) -> Ids:
        """Return the training images, or the images of the test split."""
        first = self.number("train_images")
        return np.arange(first) if train else np.arange(first, first + self.number("eval_images"))
