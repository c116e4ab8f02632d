"""Training of a model whose stages are on different ranks, by the schedules of PyTorch's pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from accelmark.frameworks.pytorch.hooks import AUTOCAST_DTYPES, Hooks
from accelmark.frameworks.pytorch.mesh.sharding import Received
from accelmark.frameworks.pytorch.state import Training

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import Batch, TrainCase

T = TypeVar("T")


@final
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


@final
@dataclass
class PipelineTraining(Training):
    """Training of this rank's stage. Every stage has the batches, and the last one the results."""

    stage: _Stage
    group: dist.ProcessGroup
    """The ranks of a pipeline, in the order of their stages."""
    layout: Sequence[Sequence[tuple[str, torch.Size, torch.dtype]]]
    """Name, shape and type of the parameters of each stage."""
    width: int
    """Of the hidden states."""
    dtype: torch.dtype
    """Of the hidden states."""
    device: torch.device
    _schedule: Any = None

    @classmethod
    def open(cls, training: Training, case: TrainCase, hooks: Hooks) -> Self:
        """Return ``training`` with the stage of this rank; all ranks of a pipeline call it together."""
        devices, parts = hooks.devices, case.pipeline_parts()
        assert devices is not None  # noqa: S101 - model_to_ddp has divided the model
        assert parts is not None  # noqa: S101
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
        """Scale the gradients of all stages to a global norm of at most ``norm``."""
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
        """Return the value of the last stage."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=self.stage.num_stages - 1)
        return values[0]

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of all stages by name, one at a time; all ranks call it together."""
        for number, parameters in enumerate(self.layout):
            local_parameters = Training.whole_parameters(self) if number == self.stage.number else iter(())
            for name, shape, dtype in parameters:
                value = next(local_parameters, (name, None))[1]
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, group=self.group, group_src=number)
                yield name, value
