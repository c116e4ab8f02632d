"""Low-rank adaptation of linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer plus a trained low-rank change: W x + (alpha / rank) B A dropout(x).

    Hu et al. 2021, arXiv:2106.09685, section 4.1. B starts at zero, A as PyTorch initializes linear layers.
    """

    def __init__(self, base: nn.Linear, down: nn.Linear, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base, self.down = base, down
        self.up = nn.Linear(down.out_features, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)
        self._scale, self._dropout = alpha / down.out_features, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shape (..., output width)."""
        changed: Tensor = self.up(self.down(F.dropout(x, self._dropout, self.training)))
        output: Tensor = self.base(x) + self._scale * changed
        return output


def adapt(model: nn.Module, layers: Sequence[Sequence[str]], rank: int, alpha: float, dropout: float) -> None:
    """Freeze ``model``, and put :class:`LowRank` in place of its linear layers with the given names.

    Args:
        model: changed in place.
        layers: names within a block, in groups. The layers of a group have the same input and share A, as if they were
            one fused layer.
        rank: rows of A.
        alpha: scale of the change, times the rank.
        dropout: probability that an input of A is zero in training.
    """
    model.requires_grad_(False)
    for block in list(model.modules()):
        for group in layers:
            replaced = {name: module for name, module in block.named_children() if name in group}
            if not replaced:
                continue
            first = next(iter(replaced.values()))
            assert isinstance(first, nn.Linear)  # noqa: S101 - the case names linear layers
            down = nn.Linear(first.in_features, rank, bias=False, device=first.weight.device)
            for name, module in replaced.items():
                assert isinstance(module, nn.Linear)  # noqa: S101
                setattr(block, name, LowRank(module, down, alpha, dropout))
