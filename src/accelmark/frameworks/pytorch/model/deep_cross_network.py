"""Deep and cross network (DCN v2) over dense features and embedding tables, as in MLPerf's DLRM-DCNv2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.spec.backports import pairwise


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers, each followed by a ReLU."""
    return nn.Sequential(*(part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())))


class CrossLayer(nn.Module):
    """A low-rank cross layer of DCN v2 (Wang et al. 2020, arXiv:2008.13535, equation 2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
        for linear in (self.down, self.up):
            nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, first: Tensor, state: Tensor) -> Tensor:
        """Return ``first`` x the layer's output + ``given``, of the shape of both."""
        crossed: Tensor = first * self.up(self.down(state)) + state
        return crossed


class DeepCrossNetwork(nn.Module):
    """Layers for dense features, embedding tables, cross layers over both, and layers up to a logit."""

    def __init__(
        self, tables: EmbeddingTables, dense: Sequence[int], cross: Sequence[int], over: Sequence[int]
    ) -> None:
        super().__init__()
        width = dense[-1] * (1 + len(tables.rows))
        self.tables, self.dense = tables, layers(dense)
        self.cross = nn.ModuleList(CrossLayer(width, rank) for rank in cross)
        self.over = nn.Sequential(layers([width, *over]), nn.Linear(over[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return a logit for each sample."""
        first = state = torch.cat([self.dense(dense)[:, None], self.tables(ids)], 1).flatten(1)
        for layer in self.cross:
            state = layer(first, state)
        logits: Tensor = self.over(state).squeeze(1)
        return logits
