"""Precision of training, and linear layers in FP8: their numbers, and what ranks and the audit see of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.model.linear import Fp8Linear, to_fp8
from accelmark.spec.errors import RequestError
from tests.train.conftest import Train
from tests.train.jobs import Ran, make_job, run

ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.01}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("shared", "changed", "rel"),
    [
        ({}, {"precision": "bf16"}, 0.1),
        ({}, {"precision": "fp16", "gradient_clip_norm": 100.0}, 0.1),
        (ADAM, {"parallelism": "fsdp2"}, 1e-5),
        ({}, {"compile": "default"}, 1e-4),
        ({}, {"channels_last": True}, 1e-6),
    ],
    ids=["bf16", "fp16", "fsdp2", "compile", "channels_last"],
)
def test_one_rank_trains_close_to_plain_fp32(
    train: Train, shared: dict[str, Any], changed: dict[str, Any], rel: float
) -> None:
    plain = train(shared).losses()
    ran = train(shared | changed)
    assert ran.losses() == pytest.approx(plain, rel=rel)
    if changed == {"precision": "bf16"}:
        assert ran.losses() != plain
        assert ran.values("INIT_END")[0]["precision"] == "bf16"


def test_tf32_on_a_cpu_computes_fp32_and_says_so(train: Train) -> None:
    ran = train({"precision": "tf32"})
    assert ran.values("INIT_END")[0]["precision"] == "fp32"
    assert "tf32 is not available on cpu" in ran.values("WARNING")[0]["message"]


@pytest.mark.heavy
def test_a_host_without_a_compiler_trains_uncompiled_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(make_job(tmp_path), tmp_path / "plain").losses()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    ran = run(make_job(tmp_path, {"compile": "default"}), tmp_path / "compiled")
    assert ran.losses() == plain
    message = ran.values("WARNING")[0]["message"]
    assert message.startswith(
        "compile: default: this host cannot compile, so the model is trained without compilation ("
    )
    assert "/nowhere/c++" in message


def trained(layer: nn.Linear, rows: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, and gradients of input and weight, of a batch of two sequences."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(1)
    given = (torch.randn(2, rows // 2, layer.in_features, generator=generator) * scale).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(given)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype) * 1e-4)
    assert given.grad is not None
    assert layer.weight.grad is not None
    return output.detach(), given.grad, layer.weight.grad


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4], ids=["small", "one", "large"])
def test_products_and_gradients_differ_from_bf16_by_the_rounding_of_fp8(scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    expected = trained(layer, 32, scale)
    to_fp8([layer])
    found = trained(layer, 32, scale)
    assert type(layer) is Fp8Linear
    # e4m3 has three bits of mantissa, e5m2 two: relative rounding errors of up to 2**-4 and 2**-3.
    for name, limit, ours, theirs in zip("oiw", (0.06, 0.12, 0.12), found, expected, strict=True):
        assert 1e-3 < float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < limit, name
    assert found[0].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32


def test_rows_that_no_fp8_product_takes_and_a_gradient_of_nothing() -> None:
    layer, given = nn.Linear(16, 16), torch.randn(3, 16)
    expected = layer(given)
    to_fp8([layer])
    assert torch.equal(layer(given), expected)
    layer(torch.zeros(16, 16)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.eq(0).all()


def test_a_layer_in_fp8_is_the_cases_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5))
    to_fp8([model])
    assert [type(layer) for layer in model] == [Fp8Linear, nn.Linear], "5 is not a multiple of 16"
    with pytest.raises(RequestError, match="no linear layer of a fitting size"):
        to_fp8([nn.Linear(3, 3)])


def checked(ran: Ran, bf16: Ran) -> None:
    assert ran.exit_code == 0, ran.output + ran.log()
    assert ran.losses() == pytest.approx(bf16.losses(), rel=0.1)
    assert ran.losses() != bf16.losses()
    (started,) = ran.values("INIT_END")
    assert (started["precision"], started["compute_type"]) == ("fp8", "bfloat16+float8_e4m3fn")


def test_a_case_trains_in_fp8_close_to_bf16(train: Train) -> None:
    checked(train({"precision": "fp8"}), train({"precision": "bf16"}))


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_two_ranks_train_in_fp8_close_to_bf16(tmp_path: Path, parallelism: str) -> None:
    settings = {"parallelism": parallelism, "end.max_steps": 6}
    bf16 = run(make_job(tmp_path / "bf16", {**settings, "precision": "bf16"}, nproc=2), tmp_path / "bf16")
    checked(run(make_job(tmp_path / "fp8", {**settings, "precision": "fp8"}, nproc=2), tmp_path / "fp8"), bf16)
