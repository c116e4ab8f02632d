from pathlib import Path

import pytest

from tests.train.conftest import RunHere
from tests.train.jobs import make_job, run


def test_bf16_trains_close_to_fp32(tmp_path: Path, run_here: RunHere) -> None:
    full = run_here(make_job(tmp_path)).losses()
    half = run_here(make_job(tmp_path, {"precision": "bf16"}))
    assert half.losses() == pytest.approx(full, rel=0.1)
    assert half.losses() != full
    assert half.values("INIT_END")[0]["precision"] == "bf16"


def test_fp16_trains_with_a_scaler_on_the_cpu(tmp_path: Path, run_here: RunHere) -> None:
    """The scaler's own arithmetic is the same everywhere; what fp16 does on an accelerator is not seen here."""
    full = run_here(make_job(tmp_path)).losses()
    settings = {"precision": "fp16", "gradient_clip_norm": 100.0}
    assert run_here(make_job(tmp_path, settings)).losses() == pytest.approx(full, rel=0.1)


def test_tf32_on_a_cpu_computes_fp32_and_says_so(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path, {"precision": "tf32"}))
    assert ran.values("INIT_END")[0]["precision"] == "fp32"
    assert "tf32 is not available on cpu" in ran.values("WARNING")[0]["message"]


def test_fsdp2_on_one_rank_trains_as_ddp(tmp_path: Path, run_here: RunHere) -> None:
    plain = run_here(make_job(tmp_path, {"optimizer.name": "adamw", "optimizer.lr": 0.01})).losses()
    sharded = make_job(tmp_path, {"optimizer.name": "adamw", "optimizer.lr": 0.01, "parallelism": "fsdp2"})
    assert run_here(sharded).losses() == pytest.approx(plain, rel=1e-5)


@pytest.mark.filterwarnings("default")
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path, run_here: RunHere) -> None:
    plain = run_here(make_job(tmp_path)).losses()
    assert run_here(make_job(tmp_path, {"compile": "default"})).losses() == pytest.approx(plain, rel=1e-4)


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


def test_channels_last_keeps_the_losses(tmp_path: Path, run_here: RunHere) -> None:
    plain = run_here(make_job(tmp_path)).losses()
    assert run_here(make_job(tmp_path, {"channels_last": True})).losses() == pytest.approx(plain, rel=1e-6)
