"""Splitting the layers of a model's blocks over ranks through DTensor (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from accelmark.frameworks.pytorch.case import Split
from accelmark.spec.errors import RequestError


def split_layers(model: nn.Module, blocks: Sequence[nn.Module], splits: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Split the named linear layers of each block over the ranks of ``mesh``; all other layers are replicated.

    Every rank has the whole model, or its structure on the meta device; nothing is exchanged.

    Args:
        model: changed in place; its parameters become DTensors on ``mesh``.
        blocks: modules with the layers in ``splits``.
        splits: name within a block -> how the layer is split.
        mesh: of one dimension.

    Raises RequestError: the model has no layers that can be split.
    """
    if not blocks or not splits:
        raise RequestError(f"parallelism: {type(model).__name__} has no layers that tp could split")
    for block in blocks:
        styles: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if how == "columns" else RowwiseParallel() for name, how in splits.items()
        }
        parallelize_module(block, mesh, styles, src_data_rank=None)
    for module in list(model.modules()):
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(isinstance(parameter, DTensor) for parameter in parameters):
            _replicate(module, mesh)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module's own parameters DTensors that every rank has in full: an optimizer wants one mesh for all."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    module.register_forward_pre_hook(partial(_enter, mesh))
    module.register_forward_hook(_leave)


def _enter(mesh: DeviceMesh, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(DTensor.from_local(each, mesh, [Replicate()]) if isinstance(each, Tensor) else each for each in inputs)


def _leave(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output
