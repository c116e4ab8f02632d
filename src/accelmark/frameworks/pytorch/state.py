"""The model, optimizer and schedule that an optimizer step uses, and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from accelmark.frameworks.pytorch.model.identity import Autocast, whole

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import Batch, TrainCase

T = TypeVar("T")
AUTOCAST_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Precision -> type of matrix products in the forward pass."""


@dataclass
class Training:
    """Everything that an optimizer step uses."""

    model: nn.Module
    """As returned by ``model_to_ddp``."""
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: GradScaler | None
    autocast: Autocast

    @property
    def module(self) -> nn.Module:
        """The model inside its wrapper for several ranks, or the model itself."""
        inner: nn.Module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return inner

    @property
    def original(self) -> nn.Module:
        """``module`` without the wrapper of ``torch.compile``: its parameters have the names of the case's model."""
        inner: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return inner

    def update(self, clip_norm: float | None) -> None:
        """Clip gradients to a global norm, step the optimizer, clear gradients and step the schedule."""
        if clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.clip_gradients(clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()

    def clip_gradients(self, norm: float) -> None:
        """Scale the gradients of all ranks' parameters to a global norm of at most ``norm``."""
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def forward(self, case: TrainCase, batch: Batch, compute: Callable[[nn.Module, Batch], T]) -> T | None:
        """Return the result of ``compute``, such as ``case.eval_sums``, for a batch; None where another rank has it."""
        with self.autocast():
            return compute(self.module, batch)

    def broadcast_result(self, value: T) -> T:
        """Return ``value`` of the rank that has the results of :meth:`forward`; ranks that share samples call it."""
        return value

    def optimizer_names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in the order of its state's numbers."""
        names = {id(parameter): name for name, parameter in self.original.named_parameters()}
        return [names[id(each)] for group in self.optimizer.param_groups for each in group["params"]]

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by name, shared ones once; a sharded one is gathered by all ranks together."""
        return ((name, whole(parameter)) for name, parameter in self.original.named_parameters())

    def trained_parts(self) -> dict[str, Tensor]:
        """Return this rank's parts of the trainable parameters by name, not copied."""
        return {name: local(each) for name, each in self.original.named_parameters() if each.requires_grad}

    def optimizer_state(self, *, keep: bool = True) -> dict[str, Any]:
        """Return the state of the optimizer as ``state_dict`` does; tensors may be left out unless ``keep``."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`optimizer_state`."""
        self.optimizer.load_state_dict(state)
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and type(value) is Tensor:
                    # In the parameter's memory format, which fused optimizers assume: the saved one may differ.
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def model_state(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the state of the model by the case's names; tensors may be left out unless ``keep``."""
        state: dict[str, Tensor] = self.original.state_dict()
        return state

    def distinct_state(self) -> dict[str, Tensor]:
        """Return the state of the model with tensors of several names, such as tied weights, by the first of these."""
        state: dict[str, Tensor] = self.original.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        return {name: each.detach() for name, each in state.items() if first[id(each)] == name}

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Copy whole tensors into parameters and buffers. Raises ValueError: the state is of another model."""
        left, done = dict(state), set()
        for name, tensor in self.original.state_dict(keep_vars=True).items():
            saved, shape = left.pop(name), self.shape_of(tensor)
            if shape != saved.shape:
                raise ValueError(f"{name} has shape {tuple(shape)}, in the checkpoint {tuple(saved.shape)}")
            if id(tensor) not in done:
                done.add(id(tensor))
                self.set_tensor(tensor, saved)
        if left:
            raise ValueError(f"the model has no {', '.join(left)}")

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """Return the shape of a whole parameter or buffer, also where ranks hold parts of it."""
        return tensor.shape

    @torch.no_grad()
    def set_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Copy a whole tensor into a parameter or buffer, or its part into this rank's."""
        if not hasattr(tensor, "placements"):
            tensor.copy_(value)
            return
        from torch.distributed.tensor import distribute_tensor  # takes most of a second, and most runs do not shard

        sharded: Any = tensor
        part = distribute_tensor(value.to(tensor.device), sharded.device_mesh, sharded.placements)
        sharded.to_local().copy_(part.to_local())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached: its shard where it is sharded."""
    shard: Any = getattr(tensor, "to_local", None)
    return tensor.detach() if shard is None else shard().detach()
