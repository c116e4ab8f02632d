"""Spreading a model over ranks by stages, split layers and FSDP2, and marks of what the ranks exchange.

Importing this module takes most of a second: only runs that shard do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import Self

from accelmark.frameworks.pytorch.case import Batch, PipelineParts, Split, TrainCase
from accelmark.frameworks.pytorch.context_parallel import SequencePart
from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.frameworks.pytorch.model.identity import materialize
from accelmark.frameworks.pytorch.state import AUTOCAST_DTYPES, Training
from accelmark.frameworks.pytorch.training.platform import all_gather, reduce_scatter
from accelmark.spec.errors import RequestError
from accelmark.spec.parallelism import Mesh
from accelmark.train.loop.contract import StepClock

T = TypeVar("T")


def open_mesh(device: torch.device, mesh: Mesh) -> DeviceMesh:
    """Return all ranks as a mesh of the axes in use, and ``fsdp``, which includes cp; all ranks call it together."""
    axes = {"dp": mesh.dp or 1, "pp": mesh.pp, "fsdp": mesh.fsdp * mesh.cp, "tp": mesh.tp}
    names = tuple(name for name, degree in axes.items() if degree > 1 or name == "fsdp")
    return init_device_mesh(device.type, tuple(axes[name] for name in names), mesh_dim_names=names)


def shard(
    model: nn.Module, case: TrainCase, devices: DeviceMesh, dtype: torch.dtype | None, *, scatter: bool
) -> nn.Module:
    """Spread ``model`` over the ranks in place, and return it on this rank's device.

    With pp it keeps the stage of this rank, tp splits its layers, ep gives each rank some of the experts, and fsdp
    shards it block by block. With cp, ``case`` gets this rank's part of each sequence. The rows of
    :class:`EmbeddingTables` are shared among all ranks, and looked up where they are instead of gathered.

    ``devices`` has the axes dp, pp, fsdp and tp that are in use. Parameters are gathered in ``dtype``; None keeps
    theirs. Gradients are reduced in fp32. With ``scatter``, the model is on the meta device on ranks other than 0, and
    every rank gets its shards, and all buffers, of rank 0's model.
    """
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
        split_layers(model, blocks, case.split_layers(), devices["tp"])
    tables = [module for module in model.modules() if isinstance(module, EmbeddingTables)]
    for each in tables:
        each.share_rows(init_device_mesh(device.type, (dist.get_world_size(),)), device)
    shared = {table.weight for table in tables}
    if case.place.mesh.cp > 1:
        if not case.splits_sequences():
            raise RequestError(f"parallelism: cp cannot split the sequences of {type(model).__name__}")
        case.sequence = SequencePart.open(device, case.place.mesh)
    if case.place.mesh.ep > 1:
        from accelmark.frameworks.pytorch.model.hugging_face import spread_experts

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
    """Copy rank 0's parameters, which ``whole`` has by name, to the shards of all ranks one by one, and its buffers."""
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


class PassThrough(nn.Module):
    """In the place of a module of another stage: returns its first argument."""

    def forward(self, tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
        return tensor


class Received(nn.Module):
    """In the place of the embedding: returns the states received from the stage before."""

    hidden: Tensor

    def forward(self, *_args: Any) -> Tensor:
        """Return the hidden states, of shape (samples, length, width)."""
        return self.hidden


def keep_stage(model: nn.Module, parts: PipelineParts | None, stage: int, num_stages: int) -> None:
    """Remove the modules of other stages (from 0) from ``model``, in place; all others keep their names."""
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


def split_layers(model: nn.Module, blocks: Sequence[nn.Module], splits: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Split the named linear layers of each block over ``mesh``, in place (Shoeybi et al. 2019, arXiv:1909.08053)."""
    if not blocks or not splits:
        raise RequestError(f"parallelism: {type(model).__name__} has no layers that tp could split")
    for block in blocks:
        styles: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if how == "columns" else RowwiseParallel() for name, how in splits.items()
        }
        parallelize_module(block, mesh, styles, src_data_rank=None)
    for module in list(model.modules()):
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters or any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            continue
        for name, parameter in parameters.items():  # an optimizer wants one mesh for all
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(partial(_enter, mesh))
        module.register_forward_hook(
            lambda _module, _inputs, output: output.to_local() if isinstance(output, DTensor) else output
        )


def _enter(mesh: DeviceMesh, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(DTensor.from_local(each, mesh, [Replicate()]) if isinstance(each, Tensor) else each for each in inputs)


class _Stage(nn.Module):
    """This rank's stage, as a schedule calls it for each microbatch."""

    def __init__(self, training: Training, case: TrainCase, number: int, num_stages: int) -> None:
        super().__init__()
        self.number, self.num_stages = number, num_stages
        self.is_last = number == num_stages - 1
        self.num_microbatches = case.settings.gradient_accumulation_steps * case.settings.microbatches(num_stages)
        self._training, self._case, self._model = training, case, training.module
        self._entry = next((module for module in self._model.modules() if isinstance(module, Received)), None)

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor:
        """Return the hidden states; in the last stage, the microbatch's part of the mean loss over a step."""
        output: Tensor = self.compute(received, batch, self._case.loss)
        return output / self.num_microbatches if self.is_last else output

    def compute(self, received: Sequence[Tensor], batch: Batch, last: Callable[[nn.Module, Batch], T]) -> Any:
        """Return the hidden states; in the last stage, the result of ``last`` for them and the batch."""
        if self._entry is not None:
            (self._entry.hidden,) = received
        with self._training.autocast():
            return last(self._model, batch) if self.is_last else self._model(self._case.model_input(batch))


@dataclass
class PipelineTraining(Training):
    """Training of this rank's stage. Every stage has the batches, and the last one the results."""

    stage: _Stage
    group: dist.ProcessGroup
    """The ranks of a pipeline, in the order of their stages."""
    layout: Sequence[Sequence[tuple[str, torch.Size, torch.dtype]]]
    """Name, shape and type of the parameters of each stage."""
    width: int
    dtype: torch.dtype
    device: torch.device
    _schedule: Any = None

    @classmethod
    def open(cls, training: Training, case: TrainCase, devices: DeviceMesh) -> Self:
        """Return ``training`` with the stage of this rank; all ranks of a pipeline call it together."""
        parts = case.pipeline_parts()
        assert parts is not None  # noqa: S101 - model_to_ddp has divided the model
        group = devices.get_group("pp")
        shapes = [(name, parameter.shape, parameter.dtype) for name, parameter in training.original.named_parameters()]
        layout: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]] * group.size()
        dist.all_gather_object(layout, shapes, group)
        (width,) = (shape[-1] for name, shape, _ in layout[0] if name == f"{parts.first}.weight")
        dtype = AUTOCAST_DTYPES.get(case.settings.precision, torch.float32)
        stage = _Stage(training, case, group.rank(), group.size())
        whole = training.model, training.optimizer, None, None, training.autocast
        return cls(*whole, stage, group, layout, width, dtype, case.place.device)

    def take_step(self, case: TrainCase, batches: Sequence[Batch]) -> Tensor:
        """Take one optimizer step over ``batches``, and return their mean loss as ``Hooks.train_step`` does."""
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        if self._schedule is None:
            self._schedule = self._open_schedule(case, joined)
        losses: list[Tensor] = []
        # A schedule wants labels for its loss; here the stage has computed it from the batch.
        self._schedule.step(target=next(iter(joined.values())), losses=losses, return_outputs=False, **joined)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(loss, group=self.group)
        self.update(case.settings.gradient_clip_norm)
        return loss

    def _open_schedule(self, case: TrainCase, batch: Batch) -> Any:
        # Imported here: it takes most of a second, and most runs have no pipeline.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage, count = self.stage, self.stage.num_microbatches
        samples, *shape = case.model_input(batch).shape
        hidden = torch.empty(samples // count, *shape, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        engine = PipelineStage(
            stage,
            stage.number,
            stage.num_stages,
            self.device,
            input_args=(hidden,) if stage.number else (),
            output_args=loss if stage.is_last else hidden,
            group=self.group,
        )
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[case.settings.pipeline.schedule]
        return schedule(engine, count, loss_fn=lambda output, _target: output, scale_grads=False)

    @torch.no_grad()
    def clip_gradients(self, norm: float) -> None:
        parameters = list(self.model.parameters())
        total: Any = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        square = (total.full_tensor() if hasattr(total, "full_tensor") else total).square()
        dist.all_reduce(square, group=self.group)
        nn.utils.clip_grads_with_norm_(parameters, norm, square.sqrt())

    def forward(self, case: TrainCase, batch: Batch, compute: Callable[[nn.Module, Batch], T]) -> T | None:
        """Pass a batch through all stages; the last stage returns the result of ``compute``, the others None."""
        number, received = self.stage.number, []
        if number:
            shape = (*case.model_input(batch).shape, self.width)
            received.append(torch.empty(shape, dtype=self.dtype, device=self.device))
            dist.recv(received[0], group=self.group, group_src=number - 1)
        output = self.stage.compute(received, batch, compute)
        if self.stage.is_last:
            result: T = output
            return result
        dist.send(output.contiguous(), group=self.group, group_dst=number + 1)
        return None

    def broadcast_result(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=self.stage.num_stages - 1)
        return values[0]

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for number, parameters in enumerate(self.layout):
            local_parameters = Training.whole_parameters(self) if number == self.stage.number else iter(())
            for name, shape, dtype in parameters:
                value = next(local_parameters, (name, None))[1]
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, group=self.group, group_src=number)
                yield name, value


class ShardExchange:
    """The collectives of FSDP2 and the exchanges of embedding tables, marked in the streams that they run in.

    A rank waits for others inside of them, so that those of the slowest rank are the shortest.
    """

    def __init__(self, model: nn.Module, clock: StepClock, *, has_replicas: bool) -> None:
        self._clock, self._model = clock, model
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Timed(all_gather, self))  # type: ignore[arg-type]
                reduce = _Timed(reduce_scatter, self, has_replicas=has_replicas)
                module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
                if has_replicas:
                    module.set_all_reduce_hook(self._end_reduction)
            elif isinstance(module, EmbeddingTables):
                module.timed = self.timed

    def timed(self, exchange: Callable[[], Any]) -> Any:
        """Mark begin and end of an exchange, unless it is part of an evaluation."""
        if not self._model.training:
            return exchange()
        begin = self._clock.mark()
        work = exchange()
        self._marks.append((begin, self._clock.mark()))
        return work

    def begin_reduction(self) -> None:
        """Mark the begin of a reduction over shards and replicas."""
        if self._begin is not None:
            self._clock.release([self._begin])
        self._begin = self._clock.mark()

    def _end_reduction(self, _reduced: Tensor) -> None:  # in the stream of the all-reduce
        self._marks.append((self._begin, self._clock.mark()))
        self._begin = None

    def take(self) -> list[tuple[Any, Any]]:
        """Return the marks since the last call."""
        marks, self._marks = self._marks, []
        return marks


class _Timed:
    """A collective as FSDP2 calls it (``torch.distributed.fsdp``, ``AllGather`` and ``ReduceScatter``).

    A reduce-scatter before an all-reduce over replicas is marked from the allocation of its output in its stream on.
    """

    def __init__(self, collective: Callable[..., Any], owner: ShardExchange, *, has_replicas: bool = False) -> None:
        self._collective, self._owner, self._has_replicas = collective, owner, has_replicas

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._has_replicas:
            self._owner.begin_reduction()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **options: Any
    ) -> Any:
        if args:
            options["op"] = args[0]
        exchange = partial(self._collective, output_tensor, input_tensor, group=group, **options)
        return exchange() if self._has_replicas else self._owner.timed(exchange)
