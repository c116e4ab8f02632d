"""LAMB: Adam's direction, scaled layer by layer (You et al., 2020, arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor


@final
class Lamb(torch.optim.Optimizer):
    """LAMB with decoupled weight decay and bias correction.

    The trust ratio of a parameter is ``|w| / |update|``, and 1 where either norm is 0. All parameters of a group are
    updated together (``torch._foreach_*``), without reading anything back from the device.
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
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(params, updates, alpha=-float(group["lr"]))
