"""Cross entropy over a large vocabulary without holding all logits."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from accelmark.spec.backports import zip_strict

CHUNK_TOKENS: Final = 2048
"""Tokens whose logits are in memory at once: 0.3 GB of fp32 for 32,000 tokens of vocabulary."""


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK_TOKENS) -> Tensor:
    """Return the mean cross entropy of ``hidden @ weight.T``, computed chunk by chunk with its gradients.

    Nothing is recomputed and no logits are kept. Under autocast, products are computed in its type; the loss is fp32.

    Args:
        hidden: shape (tokens, width).
        weight: shape (vocabulary, width), without bias.
        labels: shape (tokens,).
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
