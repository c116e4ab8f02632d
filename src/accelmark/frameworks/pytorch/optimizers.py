"""The optimizers and learning-rate schedules that settings can name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from accelmark.frameworks.pytorch.lamb import Lamb
from accelmark.spec.errors import RequestError
from accelmark.spec.settings import OptimizerSettings, ScheduleSettings
from accelmark.train.schedules import learning_rate_factor


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Split the trainable parameters by whether weight decay applies to them, in the order of the model."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.decay_norm_and_bias or not settings.weight_decay:
        return [{"params": trainable, "weight_decay": settings.weight_decay}]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [(matrices, settings.weight_decay), (vectors, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def build_optimizer(model: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer that ``settings`` describes over the trainable parameters of ``model``.

    Raises:
        RequestError: a fused optimizer is requested but not available.
    """
    groups = parameter_groups(model, settings)
    if settings.name == "lamb":
        if settings.fused:
            raise RequestError("optimizer.fused: LAMB has no fused form; leave it null")
        return Lamb(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    fused = _has_fused(device) if settings.fused is None else settings.fused
    if settings.fused is None and settings.name == "sgd" and _is_sharded(model):
        fused = False
    if settings.fused and not _has_fused(device):
        raise RequestError(f"optimizer.fused: PyTorch has no fused optimizer for {device.type}; leave it null")
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused
        )
    adam = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return adam(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=fused)


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model: fused SGD cannot take its parameters, fused Adam can."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _has_fused(device: torch.device) -> bool:
    return device.type in _get_fused_kernels_supported_devices()


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: ScheduleSettings, total_steps: int, steps_per_epoch: int
) -> LambdaLR:
    """Return the schedule that ``settings`` describes, stepped once after each optimizer step."""
    return LambdaLR(optimizer, learning_rate_factor(settings, total_steps, steps_per_epoch))
