"""Spreading a model over ranks by stages, tensor parallelism and FSDP2, with initial weights that only rank 0 holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts, TrainCase
from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.frameworks.pytorch.model.initialize import materialize
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.parallelism import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_without_weights(case: TrainCase, log: EventLog) -> nn.Module:
    """Return the case's model on the meta device, or with its weights, after a warning, where that is not possible."""
    try:
        with torch.device("meta"):
            return case.build_model()
    except (RuntimeError, NotImplementedError) as error:
        why = f"the model cannot be built on the meta device ({first_line(error)})"
        log.event(Event.WARNING, {"message": f"{why}: this rank builds all of it"})
        return case.build_model()


def open_mesh(device: torch.device, mesh: Mesh) -> DeviceMesh:
    """Return all ranks as a mesh of the axes in use, and ``fsdp``; all ranks call it together.

    Parameters are sharded over the ranks of cp too, which are among those of ``fsdp`` here.
    """
    # Imported here: it takes most of a second, and most runs do not shard.
    from torch.distributed.device_mesh import init_device_mesh

    axes = {"dp": mesh.dp or 1, "pp": mesh.pp, "fsdp": mesh.fsdp * mesh.cp, "tp": mesh.tp}
    names = tuple(name for name, degree in axes.items() if degree > 1 or name == "fsdp")
    return init_device_mesh(device.type, tuple(axes[name] for name in names), mesh_dim_names=names)


def shard(
    model: nn.Module,
    case: TrainCase,
    devices: DeviceMesh,
    dtype: torch.dtype | None,
    *,
    scatter: bool,
) -> nn.Module:
    """Spread ``model`` over the ranks in place, and return it on this rank's device.

    With pp it keeps the stage of this rank, tp splits its layers, ep gives each rank some of the experts, and fsdp
    shards it block by block. With cp, ``case`` gets this rank's part of each sequence. The rows of
    :class:`EmbeddingTables` are shared among all ranks, and looked up where they are instead of gathered.

    Args:
        model: on the CPU, or on the meta device on ranks other than 0 if ``scatter``.
        case: names the parts of the model.
        devices: all ranks, with the axes dp, pp, fsdp and tp that are in use.
        dtype: type that parameters are gathered in; None keeps theirs. Gradients are reduced in fp32.
        scatter: give every rank its shards, and all buffers, of rank 0's model.

    Raises RequestError: the model cannot be split or divided.
    """
    # Imported here: they take most of a second, and most runs do not shard.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = devices.mesh_dim_names or ()
    data = devices["dp", "fsdp"] if "dp" in names else devices["fsdp"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    # Detached, since sharding moves the parameters themselves to the device.
    place = None if dist.get_rank() == 0 else "meta"
    whole = {name: parameter.detach().to(place) for name, parameter in model.named_parameters()} if scatter else {}
    device, blocks = case.place.device, case.checkpointed_blocks(model)
    if "pp" in names:
        keep_stage(model, case.pipeline_parts(), devices.get_local_rank("pp"), devices["pp"].size())
        blocks = [block for block in blocks if not isinstance(block, PassThrough)]
    if "tp" in names:
        from accelmark.frameworks.pytorch.mesh.tensor_parallel import split_layers

        split_layers(model, blocks, case.split_layers(), devices["tp"])
    tables = [module for module in model.modules() if isinstance(module, EmbeddingTables)]
    for each in tables:
        each.share_rows(init_device_mesh(device.type, (dist.get_world_size(),)), device)
    shared = {table.weight for table in tables}
    if case.place.mesh.cp > 1:
        if not case.splits_sequences():
            raise RequestError(f"parallelism: cp cannot split the sequences of {type(model).__name__}")
        from accelmark.frameworks.pytorch.context_parallel import SequencePart

        case.sequence = SequencePart.open(device, case.place.mesh)
    if case.place.mesh.ep > 1:
        from accelmark.frameworks.pytorch.mesh.expert_parallel import spread_experts

        shared |= spread_experts(model, case.expert_layers(model), data)
    for block in blocks:
        fully_shard(block, mesh=data, mp_policy=policy, ignored_params=shared or None)
    fully_shard(model, mesh=data, mp_policy=policy, ignored_params=shared or None)
    if scatter:
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            materialize(model, device)
        _scatter(model, whole, device)
    for each in tables:
        each.open_rows()
    return model


@torch.no_grad()
def _scatter(model: nn.Module, whole: dict[str, Tensor], device: torch.device) -> None:
    """Copy rank 0's parameters to the shards of all ranks, one whole parameter at a time, and its buffers.

    Args:
        whole: all parameters of the model by name, in the same order on every rank; rank 0's have values.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters, is_source = dict(model.named_parameters()), dist.get_rank() == 0
    for name in list(whole):
        source, parameter = whole.pop(name), parameters.get(name)
        owner = None if parameter is None else model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, EmbeddingTables):
            owner.receive(source if is_source else None)
            continue
        value = source.to(device).contiguous() if is_source else torch.empty_like(source, device=device)
        dist.broadcast(value, src=0)
        if parameter is not None:
            assert isinstance(parameter, DTensor)  # noqa: S101 - FSDP2 has replaced every parameter
            part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@final
class PassThrough(nn.Module):
    """In the place of a module of another stage: returns its first argument."""

    def forward(self, tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
        """Return ``tensor``."""
        return tensor


@final
class Received(nn.Module):
    """In the place of the embedding: returns the states received from the stage before."""

    hidden: Tensor

    def forward(self, *_args: Any) -> Tensor:
        """Return the hidden states, of shape (samples, length, width)."""
        return self.hidden


def keep_stage(model: nn.Module, parts: PipelineParts | None, stage: int, num_stages: int) -> None:
    """Remove the modules of other stages from ``model``, in place; all others keep their names.

    Args:
        parts: its modules; the blocks are divided evenly.
        stage: from 0.

    Raises RequestError: the model cannot be divided in this way.
    """
    if parts is None:
        raise RequestError(f"parallelism: pp cannot divide {type(model).__name__}: its case states no pipeline_parts()")
    blocks = model.get_submodule(parts.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) % num_stages:
        num_blocks = len(list(blocks.children()))
        raise RequestError(f"parallelism: pp={num_stages} does not divide the {num_blocks} blocks of the model")
    ends = [model.get_submodule(name) for name in (parts.first, *parts.last)]
    divided = [*blocks, *ends]
    if any(True for module in divided for _ in module.buffers()):
        raise RequestError("parallelism: pp cannot divide a model whose blocks or ends have buffers")
    owners: dict[int, nn.Module] = {}
    for module in divided:
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), module) is not module:
                problem = f"{type(module).__name__}.{name} is shared with another module, as tied embeddings are"
                raise RequestError(f"parallelism: pp cannot divide the model: {problem}; use fsdp or tp")
    size = len(blocks) // num_stages
    for number in range(len(blocks)):
        if number // size != stage:
            blocks[number] = PassThrough()
    if stage > 0:
        model.set_submodule(parts.first, Received())
    if stage < num_stages - 1:
        for name in parts.last:
            model.set_submodule(name, PassThrough())
