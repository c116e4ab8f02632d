"""Blocks that are checkpointed and compiled compute what plain ones do, alone and on several ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelmark.frameworks.pytorch.model.blocks import Checkpointing, Compilation, wrap_blocks
from accelmark.spec.log.events import Compiled
from tests.train.jobs import Ran, make_job, run

SHORT: dict[str, Any] = {
    "batch_size": 8,
    "end.max_steps": 4,
    "log_every_steps": 4,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "evaluate.max_batches": 1,
}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

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
    assert counter.read() == Compiled(graphs=1, graph_breaks=0)


def losses(ran: Ran) -> list[float]:
    assert ran.exit_code == 0, ran.output + ran.log()
    return [loss or 0.0 for loss in ran.losses()]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("eager")
    return run(make_job(directory, SHORT, nproc=2), directory)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("parallelism", "checkpointing"),
    [
        pytest.param("fsdp2", "selective", marks=pytest.mark.heavy),
        pytest.param("ddp", "full", marks=pytest.mark.heavy),
        pytest.param("ddp", "off", marks=pytest.mark.heavy),
        pytest.param("ddp", "selective", marks=pytest.mark.heavy),
        pytest.param("fsdp2", "full", marks=pytest.mark.heavy),
        pytest.param("fsdp2", "off", marks=pytest.mark.heavy),
    ],
)
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
