"""Hooks that a vendor may override; the defaults work on any device of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from accelmark.frameworks.pytorch.model.identity import Autocast
from accelmark.frameworks.pytorch.model.linear import to_fp8
from accelmark.frameworks.pytorch.state import AUTOCAST_DTYPES, Training
from accelmark.spec.errors import RequestError
from accelmark.train.hooks import hook_records

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelmark.frameworks.pytorch.case import Batch, TrainCase

ALLOWED_HOOKS: Final = (
    "convert_model",
    "create_optimizer",
    "model_to_fp16",
    "model_to_ddp",
    "create_grad_scaler",
    "backward",
    "train_step",
)


class Hooks:
    """The default hooks, which a vendor subclasses as ``Extern`` in ``extern/__init__.py`` of its case folder.

    They are called in this order: ``convert_model``, ``model_to_fp16``, ``model_to_ddp``, ``create_optimizer`` (after
    sharding, since FSDP2 replaces the parameters), ``create_grad_scaler``, then ``train_step`` for each step. A hook
    may change *how* the chip computes; the audit compares its results with the standard case: the same parameters,
    the same kind of optimizer.
    """

    def __init__(self, case: TrainCase) -> None:
        self.case = case
        self.settings = case.settings
        self.place = case.place
        self.device = case.place.device
        self.devices: DeviceMesh | None = None
        """All ranks, once the model is spread over them."""
        self.scatters_weights = False
        """Whether FSDP2 must take the weights from rank 0: on the other ranks the model is on the meta device."""

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Return the model on its device, in the memory format of the settings; a sharded one stays where it is."""
        if self.settings.is_sharded:
            return model
        model = model.to(self.device)
        if self.settings.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def model_to_fp16(self, model: nn.Module) -> tuple[nn.Module, Autocast]:
        """Return the model and the context of its forward pass: autocast over fp32 weights for bf16, fp16 and fp8."""
        dtype = AUTOCAST_DTYPES.get(self.settings.precision)
        if self.settings.precision == "fp8":
            to_fp8(self.case.checkpointed_blocks(model) or [model])
        if dtype is None:
            return model, nullcontext
        device_type = self.device.type
        return model, lambda: torch.autocast(device_type, dtype=dtype)

    def model_to_ddp(self, model: nn.Module) -> nn.Module:
        """Return the model for several ranks: ``DistributedDataParallel``, or spread over the mesh in place."""
        if self.settings.parallelism == "deepspeed":
            return model
        if self.settings.is_sharded:
            from accelmark.frameworks.pytorch.mesh import open_mesh, shard

            self.devices = open_mesh(self.device, self.place.mesh)
            dtype = AUTOCAST_DTYPES.get(self.settings.precision)
            return shard(model, self.case, self.devices, dtype, scatter=self.scatters_weights)
        if self.place.world_size == 1:
            return model
        indices = None if self.device.type == "cpu" else [self.device.index]
        return DistributedDataParallel(model, device_ids=indices, gradient_as_bucket_view=True)

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over the parameters of ``model``, the case's own by default."""
        return self.case.build_optimizer(model)

    def create_grad_scaler(self) -> GradScaler | None:
        """Return the loss scaler for fp16, or None for other precisions."""
        return GradScaler(self.device.type) if self.settings.precision == "fp16" else None

    def backward(self, loss: Tensor, scaler: GradScaler | None) -> None:
        """Compute the gradients of ``loss``, scaled if there is a scaler."""
        scaled: Tensor = loss if scaler is None else scaler.scale(loss)
        torch.autograd.backward(scaled)

    def train_step(self, training: Training, batches: Sequence[Batch]) -> Tensor:
        """Take one optimizer step over ``batches``; returns their mean loss, detached and not read from the device."""
        count = len(batches)
        total: Any = None
        for index, batch in enumerate(batches, start=1):
            if count > 1 and isinstance(training.model, DistributedDataParallel):
                # FSDP2 reduces in every pass: each rank would otherwise keep unsharded fp32 gradients.
                training.model.require_backward_grad_sync = index == count
            with training.autocast():
                loss = self.case.loss(training.model, batch)
            if count > 1:
                loss = loss / count
            self.backward(loss, training.scaler)
            total = loss.detach() if total is None else total + loss.detach()
        training.update(self.settings.gradient_clip_norm)
        mean: Tensor = total
        return mean


def refuse_hooks(hooks: Hooks, engine: str) -> None:
    """Raise RequestError where a vendor replaces hooks that ``engine``, which takes the steps, replaces too."""
    replaced = {"model_to_ddp", "create_grad_scaler", "backward", "train_step"}
    if wrong := ", ".join(sorted(hook_records(type(hooks), Hooks).keys() & replaced)):
        problem = f"parallelism {hooks.settings.parallelism}: the vendor's hooks {wrong} do what {engine} does"
        raise RequestError(f"{problem}; set parallelism=fsdp2, or remove them")
