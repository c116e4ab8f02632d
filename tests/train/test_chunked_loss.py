from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from accelmark.frameworks.pytorch.model.chunked_loss import chunked_cross_entropy


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(50, 16, generator=random, requires_grad=True)
    weight = torch.randn(64, 16, generator=random, requires_grad=True)
    return hidden, weight, torch.randint(0, 64, (50,), generator=random)


@pytest.mark.parametrize("chunk", [7, 50, 100])
def test_chunks_give_the_loss_and_gradients_of_the_whole(chunk: int) -> None:
    hidden, weight, labels = inputs()
    whole = F.cross_entropy(hidden @ weight.t(), labels)
    expected = torch.autograd.grad(3 * whole, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk)
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    assert torch.allclose(loss, whole, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_under_autocast_products_are_bf16_and_the_loss_is_fp32() -> None:
    hidden, weight, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, 16)
        whole = F.cross_entropy((hidden @ weight.t()).float(), labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(whole.item(), rel=1e-2)
    (gradient,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(whole, weight)
    assert gradient.dtype == torch.float32
    assert float((gradient - expected).norm() / expected.norm()) < 0.02


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, labels = inputs()
    (expected,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, 16), [hidden])
    (found,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight.detach(), labels, 16), [hidden])
    assert torch.equal(found, expected)
