"""Linear layers in FP8, their low-rank adaptation, and cross entropy without all logits of the last one.

FP8 follows the tensor-wise dynamic scaling of Micikevicius et al. (2022, arXiv:2209.05433): each operand by its largest
element, e4m3 for weights and activations, e5m2 for gradients. Weights stay fp32; all else is bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError

FP8: Final = torch.float8_e4m3fn
_GRADIENT: Final = torch.float8_e5m2
_MULTIPLE: Final = 16
"""Matrix units take operands whose dimensions are multiples of it."""
_CHUNK_TOKENS: Final = 2048
"""Tokens whose logits are in memory at once: 0.3 GB of fp32 for 32,000 tokens of vocabulary."""


class Fp8Linear(nn.Linear):
    """A linear layer in FP8; a number of rows that FP8 products do not take is computed by the ordinary one."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the base class
        """Return the product in bf16."""
        rows = input.reshape(-1, self.in_features).bfloat16()
        if len(rows) % _MULTIPLE:
            return F.linear(input, self.weight, self.bias)
        product: Tensor = _Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        output = product.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def to_fp8(modules: Iterable[nn.Module]) -> None:
    """Make the linear layers in ``modules`` compute in FP8, in place. Raises RequestError: no size allows it."""
    layers = [each for module in modules for each in module.modules() if type(each) is nn.Linear]
    fitting = [each for each in layers if not each.in_features % _MULTIPLE and not each.out_features % _MULTIPLE]
    if not fitting:
        raise RequestError("precision fp8: the model's blocks have no linear layer of a fitting size; use bf16")
    for layer in fitting:
        layer.__class__ = Fp8Linear


class _Product(torch.autograd.Function):
    """``rows @ weight.T`` with its gradients, for rows of shape (n, in) and a weight of shape (out, in)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _scaled_product(rows, FP8, weight.t(), FP8, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_rows = _scaled_product(gradient, _GRADIENT, weight, FP8)
        of_weight = _scaled_product(gradient.t(), _GRADIENT, rows, FP8)
        return of_rows, of_weight.to(weight.dtype)


def _scaled_product(
    left: Tensor, left_type: torch.dtype, right: Tensor, right_type: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return ``left @ right`` in bf16; ``is_fast`` accumulates with fewer bits where a device can, for no gradients."""
    quantized_left, left_scale = _quantized(left, left_type)
    quantized_right, right_scale = _quantized(right.t(), right_type)
    return torch._scaled_mm(
        quantized_left, quantized_right.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def _quantized(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    scale = tensor.abs().amax().float().clamp(min=1e-12) / largest
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


class LowRank(nn.Module):
    """A frozen linear layer plus a trained low-rank change: W x + (alpha / rank) B A dropout(x).

    Hu et al. 2021, arXiv:2106.09685, section 4.1. B starts at zero, A as PyTorch initializes linear layers.
    """

    def __init__(self, base: nn.Linear, down: nn.Linear, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base, self.down = base, down
        self.up = nn.Linear(down.out_features, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)
        self._scale, self._dropout = alpha / down.out_features, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shape (..., output width)."""
        changed: Tensor = self.up(self.down(F.dropout(x, self._dropout, self.training)))
        output: Tensor = self.base(x) + self._scale * changed
        return output


def adapt(model: nn.Module, layers: Sequence[Sequence[str]], rank: int, alpha: float, dropout: float) -> None:
    """Freeze ``model``, and put :class:`LowRank` in place of its linear layers with the given names.

    ``layers`` has names within a block, in groups: the layers of a group have the same input and share A, as if they
    were one fused layer. ``dropout`` is the probability that an input of A is zero in training.
    """
    model.requires_grad_(False)
    for block in list(model.modules()):
        for group in layers:
            replaced = {name: module for name, module in block.named_children() if name in group}
            if not replaced:
                continue
            first = next(iter(replaced.values()))
            assert isinstance(first, nn.Linear)  # noqa: S101 - the case names linear layers
            down = nn.Linear(first.in_features, rank, bias=False, device=first.weight.device)
            for name, module in replaced.items():
                assert isinstance(module, nn.Linear)  # noqa: S101
                setattr(block, name, LowRank(module, down, alpha, dropout))


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = _CHUNK_TOKENS) -> Tensor:
    """Return the mean cross entropy of ``hidden @ weight.T``, computed chunk by chunk with its gradients.

    Nothing is recomputed and no logits are kept. Under autocast, products are computed in its type; the loss is fp32.
    ``hidden`` is of shape (tokens, width), ``weight`` of (vocabulary, width), ``labels`` of (tokens,).
    """
    kind = hidden.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        count = len(labels)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads = []
        # Summed over chunks in fp32: in bf16, later chunks would be rounded away.
        trains_weight = ctx.needs_input_grad[1]
        weight_grad = torch.zeros(weight.shape if trains_weight else (), dtype=torch.float32, device=weight.device)
        for part, expected in zip_strict(hidden.split(chunk), labels.split(chunk)):  # type: ignore[no-untyped-call]
            log_probabilities = F.log_softmax((part @ weight.t()).float(), -1)
            total = total + F.nll_loss(log_probabilities, expected, reduction="sum")
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(1, expected[:, None], gradient.new_full((len(expected), 1), -1.0))
            gradient = (gradient / count).to(hidden.dtype)
            hidden_grads.append(gradient @ weight)
            if trains_weight:
                weight_grad += gradient.t() @ part
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        (outer,) = gradients
        weighted = weight_grad * outer.to(weight_grad.dtype) if ctx.needs_input_grad[1] else None
        return hidden_grad * outer.to(hidden_grad.dtype), weighted, None, None
