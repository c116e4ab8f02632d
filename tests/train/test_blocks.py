"""Parts of models: checkpointed and compiled blocks, kernels of attention, loss over a large vocabulary."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from accelmark.frameworks.pytorch.model.blocks import Checkpointing, Compilation, wrap_blocks
from accelmark.frameworks.pytorch.model.identity import AttentionCalls, chosen_kernels, with_attention
from accelmark.frameworks.pytorch.model.linear import chunked_cross_entropy
from accelmark.spec.log.events import Compiled, Event
from tests.train.jobs import Events, Ran, make_job, run

SHORT: dict[str, Any] = {
    "batch_size": 8, "end.max_steps": 4, "log_every_steps": 4, "optimizer.name": "adamw", "optimizer.lr": 0.01,
    "evaluate.max_batches": 1,
}  # fmt: skip


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + down


def gradients(checkpointing: Checkpointing, mode: str | None) -> tuple[Tensor, Counter[str]]:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(*blocks)
    wrap_blocks(blocks, checkpointing, mode)
    loss = model(torch.randn(4, 8)).square().sum()
    with Products() as products:
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]), (
        products.count
    )


def test_full_checkpointing_recomputes_products_and_selective_keeps_them() -> None:
    counts = {}
    plain, counts["off"] = gradients("off", None)
    for checkpointing in ("full", "selective"):
        found, counts[checkpointing] = gradients(checkpointing, None)
        assert torch.equal(found, plain)
    forward = "aten.addmm.default"
    assert [counts[name][forward] for name in ("off", "full", "selective")] == [0, 3, 0], (
        "the last product needs no output"
    )
    assert counts["selective"]["aten.gelu.default"] > counts["off"]["aten.gelu.default"] == 0


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_blocks_of_one_structure_are_compiled_into_one_graph_without_breaks(checkpointing: Checkpointing) -> None:
    plain, _ = gradients("off", None)
    torch._dynamo.reset()
    counter = Compilation()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    wrap_blocks(blocks, checkpointing, "default")
    nn.Sequential(*blocks)(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    grads = [each.grad for block in blocks for each in block.parameters() if each.grad is not None]
    assert torch.allclose(torch.cat([grad.flatten() for grad in grads]), plain, rtol=1e-4, atol=1e-6)
    counter.report("default", log := Events())
    assert log == [(Event.COMPILED, Compiled(graphs=1, graph_breaks=0))]


def losses(ran: Ran) -> list[float]:
    assert ran.exit_code == 0, ran.output + ran.log()
    return [loss or 0.0 for loss in ran.losses()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("eager")
    return run(make_job(directory, SHORT, nproc=2), directory)


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_two_ranks_with_compiled_blocks_train_as_eager_ones(
    parallelism: str, checkpointing: str, eager: Ran, tmp_path: Path
) -> None:
    settings = {**SHORT, "parallelism": parallelism, "compile": "default", "activation_checkpointing": checkpointing}
    ran = run(make_job(tmp_path, settings, nproc=2), tmp_path, timeout_s=500)
    assert losses(ran) == pytest.approx(losses(eager), rel=1e-4)
    (compiled,) = ran.values("COMPILED")
    assert compiled["graphs"] >= 1
    assert compiled["graph_breaks"] == 0
    assert ran.values("WARNING") == []


CPU = torch.device("cpu")


def calls(device: str = "meta") -> AttentionCalls:
    tensor = torch.empty(2, 4, 16, 32, device=device)
    found = AttentionCalls()
    with found:
        for _ in range(3):
            F.scaled_dot_product_attention(tensor, tensor, value=tensor, is_causal=True)
        F.softmax(tensor, -1)
    return found


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
