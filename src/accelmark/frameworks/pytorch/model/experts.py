"""Experts of transformers' mixture-of-experts layers, the loss that balances them, and experts spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.requirements import pip_install

EXPERTS: Final = "accelmark_experts"
"""Name of :func:`experts_forward` in a configuration's ``experts_implementation``."""


def experts_forward(self: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs of each token.

    Tokens are sorted by expert and multiplied group by group, without reading a tensor. On the meta device, where
    FLOPs are counted, group sizes have no values; the weights of each token's active experts are gathered there.
    ``hidden`` is of shape (tokens, width), ``experts`` and their ``weights`` of (tokens, active experts).
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

    ``router_logits`` are of shape (tokens, experts); the loss is ``num_active`` where experts are used evenly.
    """
    logits = torch.cat([logit.flatten(0, -2) for logit in router_logits]).float()
    num_experts = logits.shape[-1]
    chosen = F.one_hot(logits.topk(num_active, -1).indices, num_experts).float().sum(1).mean(0)
    return num_experts * (chosen * logits.softmax(-1).mean(0)).sum()


def spread_experts(model: nn.Module, names: Sequence[str], data: DeviceMesh) -> set[nn.Parameter]:
    """Give each rank of ``fsdp`` an equal number of the experts of each named layer, and return their parameters.

    Each token is sent to the ranks of its experts by an all-to-all, and the results come back by another one (Lepikhin
    et al. 2020, arXiv:2006.16668). Every rank has the whole model, or its structure on the meta device; ``data`` is the
    axis fsdp, or the axes dp and fsdp.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # most of a second, for this alone

    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError as error:
        raise RequestError(
            f"parallelism: ep needs the exchange of tokens of transformers 5.23, found {transformers.__version__}; "
            f"run {pip_install(['transformers>=5.23'])}"
        ) from error
    if not names:
        raise RequestError(f"parallelism: {type(model).__name__} has no experts that ep could spread over ranks")
    ranks = data["fsdp"]
    placements = [Replicate()] * (data.ndim - 1) + [Shard(0)]
    for name in names:
        layer: Any = model.get_submodule(name)
        if layer.num_experts % ranks.size():
            raise RequestError(
                f"parallelism: ep={ranks.size()} does not divide the {layer.num_experts} experts of {name}"
            )
        for local_name, parameter in list(layer.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), data, placements, src_data_rank=None)
            layer.register_parameter(local_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        layer.num_experts //= ranks.size()
        exchange: Any = AllToAllEP.__new__(AllToAllEP)  # among ranks with different samples, which split no layers
        exchange.experts_forward, exchange.num_local_experts = layer.forward, layer.num_experts
        exchange.ep_mesh, exchange.tp_mesh = ranks, SimpleNamespace(size=lambda: 1)
        layer.forward = partial(_forward, layer, exchange, data)
    return {parameter for name in names for parameter in model.get_submodule(name).parameters()}


def _forward(layer: nn.Module, exchange: Any, data: DeviceMesh, hidden: Tensor, *choice: Tensor) -> Tensor:
    """Return the experts' outputs for this rank's tokens, computed with the local parts of the parameters."""
    whole: dict[str, Any] = dict(layer.named_parameters(recurse=False))
    averaged: Any = _Averaged
    layer._parameters.update({name: averaged.apply(each.to_local(), data) for name, each in whole.items()})
    try:
        output: Tensor = exchange(hidden, *choice)
    finally:
        layer._parameters.update(whole)
    return output.to(hidden.dtype)


class _Averaged(autograd.Function):
    """Averages the gradient, a sum over the tokens of ``fsdp`` neighbours, over all ranks, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, data: DeviceMesh) -> Tensor:
        ctx.data = data
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient = gradient / ctx.data.size()
        if ctx.data.ndim > 1:
            dist.all_reduce(gradient, group=ctx.data.get_group("dp"))
        return gradient, None
