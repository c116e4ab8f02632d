"""Experts on the ranks that also share the other parameters: tokens are sent to them, instead of gathering weights.

The exchange (Lepikhin et al. 2020, arXiv:2006.16668) is transformers': each token goes to the ranks of its experts by
an all-to-all, and the results come back by another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch.distributed as dist
import transformers
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.requirements import pip_install

try:
    from transformers.distributed.expert_parallel import AllToAllEP
except ImportError as error:
    raise RequestError(
        f"parallelism: ep needs the exchange of tokens of transformers 5.23, found {transformers.__version__}; "
        f"run {pip_install(['transformers>=5.23'])}"
    ) from error


def spread_experts(model: nn.Module, names: Sequence[str], data: DeviceMesh) -> set[nn.Parameter]:
    """Give each rank of ``fsdp`` an equal number of the experts of each layer, and return their parameters.

    Every rank has the whole model, or its structure on the meta device; nothing is exchanged.

    Args:
        model: changed in place; the parameters of its experts become DTensors on ``data``, sharded along their first
            dimension, the experts.
        names: of the layers with all experts.
        data: the axis fsdp, or the axes dp and fsdp.

    Raises RequestError: the model has no experts, or their number cannot be divided.
    """
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
        layer.forward = partial(_forward, layer, _Exchange(layer, ranks), data)
    return {parameter for name in names for parameter in model.get_submodule(name).parameters()}


@final
class _Exchange(AllToAllEP):
    """The exchange among ranks with different samples, which split no layers."""

    def __init__(self, layer: Any, ranks: DeviceMesh) -> None:
        self.experts_forward = layer.forward
        self.num_local_experts = layer.num_experts
        self.ep_mesh = ranks
        self.tp_mesh: Any = SimpleNamespace(size=lambda: 1)


def _forward(layer: nn.Module, exchange: _Exchange, data: DeviceMesh, hidden: Tensor, *choice: Tensor) -> Tensor:
    """Return the experts' outputs for this rank's tokens, computed with the local parts of the parameters."""
    whole = dict(layer.named_parameters(recurse=False))
    layer._parameters.update({name: _local(parameter, data) for name, parameter in whole.items()})
    try:
        output: Tensor = exchange(hidden, *choice)
    finally:
        layer._parameters.update(whole)
    return output.to(hidden.dtype)


def _local(parameter: nn.Parameter, data: DeviceMesh) -> Any:
    assert isinstance(parameter, DTensor)  # noqa: S101 - spread_experts has made it one
    return _Averaged.apply(parameter.to_local(), data)  # type: ignore[no-untyped-call]


class _Averaged(autograd.Function):
    """Averages the gradient over all ranks with samples, as FSDP2 does for other parameters.

    The gradient of a rank is already the sum over the tokens of its ``fsdp`` neighbours.
    """

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
