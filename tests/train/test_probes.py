from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.integrity.probes import Probes, rows_per_sample
from tests.train.conftest import RunHere
from tests.train.jobs import make_job
from tests.train.test_extern import vendor_folder

pytestmark = pytest.mark.adversary

HEAD = "import torch\nfrom accelmark.frameworks.pytorch.hooks import Hooks\n\nclass Extern(Hooks):\n"

SAME = """    def train_step(self, training, batches):
        return super().train_step(training, batches)
"""

FEWER = """    def train_step(self, training, batches):
        return super().train_step(training, [{name: rows[:8] for name, rows in batch.items()} for batch in batches])
"""

HALF = """    def train_step(self, training, batches):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_step(training, batches)
"""

UNTRAINED = """    def train_step(self, training, batches):
        training.model.eval()
        loss = super().train_step(training, batches)
        training.model.train()
        return loss
"""


def inspected(directory: Path, run_here: RunHere, body: str, **settings: Any) -> dict[str, Any]:
    ran = run_here(make_job(directory, settings, extern=vendor_folder(directory, HEAD + body)))
    assert ran.exit_code == 0
    told: dict[str, Any] = ran.values("INSPECTED")[0]
    return told


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_complete_step_is_counted_completely(tmp_path: Path, run_here: RunHere, accumulation: int) -> None:
    told = inspected(tmp_path, run_here, SAME, gradient_accumulation_steps=accumulation)
    assert told["samples_seen"] == told["samples_credited"] == 16 * accumulation
    assert told["compute_types"] == ["float32"]
    assert (told["samples_reason"], told["compute_reason"]) == (None, None)
    assert told["probed_steps"][0] == 1
    assert len(told["probed_steps"]) > 1


def test_a_step_that_leaves_samples_out_is_found(tmp_path: Path, run_here: RunHere) -> None:
    told = inspected(tmp_path, run_here, FEWER)
    assert (told["samples_seen"], told["samples_credited"]) == (8, 16)


def test_a_forward_pass_outside_training_does_not_count(tmp_path: Path, run_here: RunHere) -> None:
    assert inspected(tmp_path, run_here, UNTRAINED)["samples_seen"] == 0


def test_a_step_in_another_precision_is_found(tmp_path: Path, run_here: RunHere) -> None:
    assert inspected(tmp_path, run_here, HALF, precision="fp32")["compute_types"] == ["bfloat16"]


def test_evaluation_after_a_step_is_not_part_of_it(tmp_path: Path, run_here: RunHere) -> None:
    told = inspected(tmp_path, run_here, SAME, **{"end.max_steps": 1})
    assert (told["probed_steps"], told["samples_seen"]) == ([1], 16)


class Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 1e9:  # a copy without data cannot tell
            raise ArithmeticError
        return super().forward(x)


class Turned(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1))


class Little:
    """As much of a case as is needed to send samples through a model."""

    def synthetic_batch(self, size: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(size, 2)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        loss: torch.Tensor = model(x.transpose(0, 1) if isinstance(model, Turned) else x).sum()
        return loss


@pytest.mark.parametrize(("model", "rows"), [(nn.Linear(2, 2), 1.0), (Looking(2, 2), 1.0), (Turned(2, 2), None)])
def test_rows_are_counted_where_they_follow_the_samples(model: nn.Module, rows: float | None) -> None:
    case: Any = Little()
    assert rows_per_sample(case, model) == rows
    assert model.training
    assert not model._forward_pre_hooks


def drawn() -> list[int]:
    model = nn.Linear(2, 2)
    probes = Probes(4, 1.0)
    probes.open(model)

    def steps() -> Iterator[list[Batch]]:
        for _ in range(100_000):
            yield [{"x": torch.zeros(4, 2)}]

    looked = [number for number, _ in enumerate(probes.over(steps()), start=1) if model._forward_pre_hooks]
    probes.close_step()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    return looked


def test_inspected_steps_are_few_and_drawn_at_random() -> None:
    one, other = drawn(), drawn()
    assert one != other
    assert one[0] == other[0] == 1
    assert 5 <= len(one) <= 13


def test_uncounted_steps_are_reported() -> None:
    model = nn.Linear(2, 2)
    probes = Probes(4, 1.0)
    probes.open(model)
    for number, _ in enumerate(probes.over(iter([[{"x": torch.zeros(4, 2)}]] * 200))):
        if number == 0:
            model(torch.zeros(4, 2))
    told = probes.result()
    assert told["samples_seen"] is None
    assert "replay of a recorded graph" in told["samples_reason"]
