"""Experts of transformers' mixture-of-experts layers, and the loss that balances them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

EXPERTS: Final = "accelmark_experts"
"""Name of :func:`experts_forward` in a configuration's ``experts_implementation``."""


def experts_forward(self: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs of each token.

    Tokens are sorted by expert and multiplied group by group, without reading a tensor. On the meta device, where
    FLOPs are counted, group sizes have no values; there the weights of each token's experts are gathered, which has
    the same products: of the active experts only.

    Args:
        hidden: shape (tokens, width).
        experts: the chosen experts of each token, shape (tokens, active experts).
        weights: their weights, of the same shape.
    """
    if hidden.is_meta:
        counted: Tensor = batched_mm_experts_forward(self, hidden, experts, weights)
        return counted
    layer: Any = self
    if torch.is_autocast_enabled(hidden.device.type):
        # Grouped products are not among the operators of autocast.
        layer = _Converted(self, torch.get_autocast_dtype(hidden.device.type))
    output: Tensor = grouped_mm_experts_forward(layer, hidden, experts, weights)
    return output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


class _Converted:
    """A layer seen with its parameters converted to a type."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self._layer = layer
        self.__dict__.update((name, parameter.to(dtype)) for name, parameter in layer.named_parameters())

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)


def balancing_loss(router_logits: Sequence[Tensor], num_active: int) -> Tensor:
    """Return the load-balancing loss of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4-6).

    Experts x the sum over experts of the share of choices and the mean probability, over all layers' tokens together;
    ``num_active`` where the experts are used evenly.

    Args:
        router_logits: of each layer, shape (tokens, experts).
        num_active: experts that each token is sent to.
    """
    logits = torch.cat([logit.flatten(0, -2) for logit in router_logits]).float()
    num_experts = logits.shape[-1]
    chosen = F.one_hot(logits.topk(num_active, -1).indices, num_experts).float().sum(1).mean(0)
    return num_experts * (chosen * logits.softmax(-1).mean(0)).sum()
