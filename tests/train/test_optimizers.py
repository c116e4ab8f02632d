import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from accelmark.frameworks.pytorch.optimizers import Lamb, build_optimizer
from accelmark.spec.settings.training import OptimizerSettings, ScheduleSettings
from accelmark.train.loop.ends import learning_rate_factor

CPU = torch.device("cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_weight_decay_skips_norms_and_biases_on_request_and_frozen_parameters_stay() -> None:
    settings = OptimizerSettings(name="adamw", weight_decay=0.1, decay_norm_and_bias=False)
    model = make_model()
    model[0].requires_grad_(False)
    decayed, spared = build_optimizer(model, settings, CPU).param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == 4


def reference_lamb(
    weight: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float
) -> torch.Tensor:
    """Algorithm 2 of the paper, written down one tensor at a time in double precision."""
    weight = weight.double().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * grad.double()
        v = betas[1] * v + (1 - betas[1]) * grad.double() ** 2
        ratio = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        update = ratio + decay * weight
        trust = weight.norm() / update.norm() if weight.norm() > 0 and update.norm() > 0 else 1.0
        weight = weight - lr * trust * update
    return weight


@pytest.mark.parametrize("start", [1.0, 0.0], ids=["random", "zero"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_follows_its_paper(start: float, decay: float) -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(5, 3) * start)
    grads = [torch.randn(5, 3) for _ in range(4)]
    expected = reference_lamb(weight.detach(), grads, 0.02, (0.9, 0.99), 1e-6, decay)
    optimizer = Lamb([weight], lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "final_lr_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        ({"name": "cosine"}, [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
        ({"name": "polynomial", "power": 2}, [1.0, 0.5625, 0.25, 0.0625]),
        ({"name": "step", "step_epochs": 2, "step_gamma": 0.1}, [1.0, 1.0, 0.1, 0.1]),
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5]),
        ({"name": "linear", "warmup_ratio": 0.5}, [0.5, 1.0, 1.0, 0.5]),
        ({"name": "onecycle", "warmup_steps": 2}, [0.04, 0.52, 1.0, 0.5]),
        ({"name": "tri_stage", "warmup_ratio": 0.25, "final_lr_ratio": 0.09}, [1.0, 1.0, 0.3, 0.09]),
        ({"name": "tri_stage", "warmup_steps": 2, "final_lr_ratio": 0.09}, [0.505, 1.0, 0.3, 0.09]),
    ],
)
def test_schedules_have_their_shapes(settings: dict[str, float | str], expected: list[float]) -> None:
    factor = learning_rate_factor(ScheduleSettings.model_validate(settings), 4, 1)
    assert [factor(step) for step in range(4)] == pytest.approx(expected)


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "onecycle", "step", "polynomial", "tri_stage"]),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    final=st.floats(0, 1),
    step=st.integers(0, 400),
)
def test_a_schedule_stays_between_zero_and_peak(name: str, warmup: int, total: int, final: float, step: int) -> None:
    lowest = 1e-3 if name == "tri_stage" else 0.0
    values = {"name": name, "warmup_steps": warmup, "final_lr_ratio": max(final, lowest)}
    assert 0.0 <= learning_rate_factor(ScheduleSettings.model_validate(values), total, 10)(step) <= 1.0 + 1e-12


def test_three_stages_fall_to_a_share_above_zero() -> None:
    with pytest.raises(ValidationError, match="final_lr_ratio, which must be greater than 0"):
        ScheduleSettings(name="tri_stage")
