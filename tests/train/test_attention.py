"""The kernels of attention that PyTorch chooses are recorded for the shapes of the model."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelmark.frameworks.pytorch.model.attention import AttentionCalls, chosen_kernels, with_attention
from tests.train.test_blocks import Products

CPU = torch.device("cpu")


def calls(device: str = "meta") -> AttentionCalls:
    tensor = torch.empty(2, 4, 16, 32, device=device)
    found = AttentionCalls()
    with found:
        for _ in range(3):
            F.scaled_dot_product_attention(tensor, tensor, value=tensor, is_causal=True)
        F.softmax(tensor, -1)
    return found


def test_calls_are_collected_on_the_meta_device_and_repeated_ones_once() -> None:
    (call,) = calls().found
    assert (call.query, call.is_causal, call.mask) == ((2, 4, 16, 32), True, None)


@pytest.mark.parametrize(("first", "expected"), [("auto", "flash"), ("math", "math")])
def test_the_kernel_is_chosen_in_the_context_of_the_forward_pass(first: str, expected: str) -> None:
    assert chosen_kernels(calls().found, CPU, with_attention(nullcontext, first)) == (expected,)
    assert chosen_kernels([], CPU, nullcontext) == ()


def test_what_was_chosen_is_what_runs() -> None:
    tensor = torch.randn(2, 4, 16, 32, requires_grad=True)
    (kernel,) = chosen_kernels(calls().found, CPU, nullcontext)
    with Products() as operators:
        F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True)
    assert any(f"dot_product_{kernel}_attention" in name for name in operators.count)
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen_kernels(calls().found, CPU, nullcontext) == ("math",)
