"""Training in Paddle, with real ranks in an environment of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.frameworks.paddle.launch import device_support, launch
from accelmark.spec.plugins.framework import HostPlace
from tests.frameworks.environments import run_program
from tests.frameworks.rank_jobs import SMALL_LLAMA, losses, rank_events, rank_job, run_job, write_plays

OPTIMIZED = """
import json, sys
from types import SimpleNamespace
import numpy as np, paddle
from accelmark.frameworks.paddle.hooks import Hooks
from accelmark.spec.settings.training import OptimizerSettings

optimizer, clip = json.loads(sys.argv[1])
settings = SimpleNamespace(optimizer=OptimizerSettings.model_validate(optimizer), gradient_clip_norm=clip)
model = paddle.nn.Linear(4, 3)
model.weight.set_value(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
model.bias.set_value(np.linspace(0.5, 1, 3, dtype=np.float32))
optimizer = Hooks(SimpleNamespace(settings=settings, place=None)).create_optimizer(model)
x = paddle.to_tensor(np.linspace(-2, 3, 8, dtype=np.float32).reshape(2, 4))
for _ in range(5):
    (model(x) ** 2).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
print(json.dumps([model.weight.numpy().tolist(), model.bias.numpy().tolist()]))
"""


def host_place(num_ranks: int, interface: str | None = None) -> HostPlace:
    return HostPlace(
        nnodes=1, nproc=num_ranks, num_ranks=num_ranks, noderank=0, master_address="10.0.0.1", master_port=29500,
        local_address=None, interface=interface, servers=(), python="python3", rank_command=["rank", "job.json"],
    )  # fmt: skip


def test_one_rank_starts_alone_and_several_by_the_process_launcher() -> None:
    alone, several = launch(host_place(1)), launch(host_place(2, "eth0"))
    assert list(alone.command) == ["rank", "job.json"]
    assert alone.environment["WORLD_SIZE"] == "1"
    assert list(several.command)[3:6] == ["accelmark.frameworks.process_launcher", "--nproc", "2"]
    assert list(several.command)[-3:] == ["--", "rank", "job.json"]
    assert list(several.command)[-5:-3] == ["--free-port", "PADDLE_MASTER"]
    assert several.defaults["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_build_without_the_device_is_refused_with_the_package() -> None:
    support = device_support("gpu", "3.3.1")
    assert not support.works
    assert support.reason == "Paddle 3.3.1 is a build without gpu: install paddlepaddle-gpu"
    assert device_support("cpu", "3.3.1").works


@pytest.mark.heavy
def test_gradient_accumulation_with_recomputation_on_two_ranks_equals_a_larger_batch(tmp_path: Path) -> None:
    (tmp_path / "plays").mkdir()
    data, over = {"shakespeare": write_plays(tmp_path / "plays")}, {**SMALL_LLAMA, "batch_size": 2}
    over |= {"gradient_accumulation_steps": 2, "activation_checkpointing": "full"}
    job = rank_job("paddle", tmp_path / "two", "llama_mini", data, over)
    run_job(job, num_ranks=2)
    together = np.mean([losses(rank_events(job, rank)) for rank in (0, 1)], axis=0)
    whole = run_job(rank_job("paddle", tmp_path / "one", "llama_mini", data, SMALL_LLAMA))
    assert together[-1] < together[0]
    np.testing.assert_allclose(together, losses(whole), rtol=2e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "adam", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "adamw", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "lamb", "lr": 0.05, "weight_decay": 0.1, "eps": 1e-6, "decay_norm_and_bias": False},
    ],
    ids=lambda settings: settings["name"] if isinstance(settings, dict) else None,
)
def test_optimizers_compute_what_pytorchs_compute(settings: dict[str, Any], clip: float | None) -> None:
    import torch

    from accelmark.frameworks.pytorch.optimizers import build_optimizer
    from accelmark.spec.settings.training import OptimizerSettings

    weight, bias = json.loads(run_program("paddle", OPTIMIZED, json.dumps([settings, clip]))[-1])
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 12).view(4, 3).T)
        model.bias.copy_(torch.linspace(0.5, 1, 3))
    optimizer = build_optimizer(model, OptimizerSettings.model_validate(settings), torch.device("cpu"))
    for _ in range(5):
        (model(torch.linspace(-2, 3, 8).view(2, 4)) ** 2).sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(weight, model.weight.detach().numpy().T, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(bias, model.bias.detach().numpy(), rtol=2e-4, atol=2e-5)
