"""The optimizers that settings can name, and their learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError
from accelmark.spec.settings.training import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer that ``settings`` describes over the trainable parameters of ``model``."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed, undecayed = trainable, []
    if settings.weight_decay and not settings.decay_norm_and_bias:
        decayed = [parameter for parameter in trainable if parameter.ndim > 1]
        undecayed = [parameter for parameter in trainable if parameter.ndim <= 1]
    split = ((decayed, settings.weight_decay), (undecayed, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in split if params]
    if settings.fused and settings.name in ("lamb", "adagrad"):
        name = {"lamb": "LAMB", "adagrad": "Adagrad with gradients of rows"}[settings.name]
        raise RequestError(f"optimizer.fused: {name} has no fused form; leave it null")
    if settings.name == "adagrad":
        return RowAdagrad(groups, lr=settings.lr, eps=settings.eps)
    if settings.name == "lamb":
        return Lamb(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    has_fused = device.type in _get_fused_kernels_supported_devices()
    fused = has_fused if settings.fused is None else settings.fused
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in trainable)
    if settings.fused is None and settings.name == "sgd" and is_sharded:
        fused = False  # which cannot take the parameters of FSDP2, as fused Adam can
    if settings.fused and not has_fused:
        raise RequestError(f"optimizer.fused: PyTorch has no fused optimizer for {device.type}; leave it null")
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused
        )
    adam = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return adam(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=fused)


def with_own_rate(
    optimizer: torch.optim.Optimizer, model: nn.Module, part: str, factor: float
) -> torch.optim.Optimizer:
    """Multiply the learning rate of the weights that have ``part`` in their names, between dots."""
    selected = {parameter for name, parameter in model.named_parameters() if f".{part}." in f".{name}."}
    for group in list(optimizer.param_groups):
        chosen = [parameter for parameter in group["params"] if parameter in selected]
        group["params"] = [parameter for parameter in group["params"] if parameter not in selected]
        if chosen:
            optimizer.add_param_group({**group, "params": chosen, "lr": group["lr"] * factor})
    return optimizer


class RowAdagrad(torch.optim.Adagrad):
    """Adagrad (Duchi et al. 2011, JMLR 12); of tables whose rows ranks share, it updates the rank's ``own_rows``."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; ``closure`` is evaluated first if given."""
        checked: Any = torch.sparse.check_sparse_tensor_invariants
        with checked(False):  # the default; PyTorch warns where it is not stated
            loss: float | None = super().step(closure)
        with checked(False), torch.no_grad():
            for group in self.param_groups:
                options = {name: group[name] for name in ("lr", "weight_decay", "lr_decay", "eps", "maximize")}
                options |= {"has_sparse_grad": True, "foreach": False}
                for parameter, rows in _shared_rows(group):
                    state = self.state[parameter]
                    adagrad([rows], [rows.grad], [state["sum"].to_local()], [state["step"]], **options)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for _, rows in _shared_rows(group):
                rows.grad = None


def _shared_rows(group: dict[str, Any]) -> list[tuple[Tensor, Any]]:
    """Return the parameters of a group whose rows ranks share, with this rank's rows, where they have gradients."""
    pairs = ((parameter, getattr(parameter, "own_rows", None)) for parameter in group["params"])
    return [(parameter, rows) for parameter, rows in pairs if rows is not None and rows.grad is not None]


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020, arXiv:1904.00962, algorithm 2) with decoupled weight decay and bias correction.

    The trust ratio of a parameter is ``|w| / |update|``, and 1 where either norm is 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; ``closure`` is evaluated first if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(params, group)
        return loss

    def _step_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads = [param.grad for param in params if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        states = [self.state[param] for param in params]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        step = float(states[0]["step"])
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**step))
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(averages, 1 - beta1**step), denominators)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        weights = torch.stack(torch._foreach_norm(params))
        norms = torch.stack(torch._foreach_norm(updates))
        ratios = torch.where((weights > 0) & (norms > 0), weights / norms, torch.ones_like(weights))
        torch._foreach_mul_(updates, _spread(ratios, updates))
        torch._foreach_add_(params, updates, alpha=-float(group["lr"]))


def _spread(ratios: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each ratio in its parameter's shape: tensors of no dimension would take a kernel for each parameter."""
    if any(hasattr(tensor, "device_mesh") for tensor in tensors):
        return list(ratios.unbind())
    sizes = tuple(each.numel() for each in tensors)
    spread = ratios.repeat_interleave(_on_device(sizes, ratios.device), output_size=sum(sizes))
    return [part.view_as(each) for part, each in zip_strict(torch.split(spread, list(sizes)), tensors)]


@lru_cache(maxsize=16)
def _on_device(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device)
