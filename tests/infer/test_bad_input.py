"""Mistakes of people and machines, and the end of each run: its step, its reason, and what its message names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.infer.engine import Context, InferenceError, check_separate_memory, classify, end_reason_of
from accelmark.spec.settings.inference import InferStep

LOADED = {"no_validation": True, "exist_onnx_path": "x"}
RETURNS = """
def __call__(self, inputs):
    outputs, other_s = super().__call__(inputs)
    return {outputs}, {other_s}
"""


def _failed(ran: Any, step: InferStep, end_reason: str) -> str:
    assert ran.finished.state == "failed"
    assert (ran.finished.failed_step, ran.finished.end_reason) == (step, end_reason), ran.finished.message
    assert not ran.finished.valid
    return str(ran.finished.message)


@pytest.mark.parametrize(
    ("settings", "step", "reason", "words"),
    [
        (LOADED | {"compiler": "openvino", "exist_compiler_path": "/nowhere/x.blob"}, "initialise",
         "incompatible_engine", "/nowhere/x.blob"),
        ({"compiler": "eager", "exist_compiler_path": "/bin/sh"}, "initialise", "bad_request", "exist_compiler_path"),
        ({"compiler": "onnxruntime", "exist_onnx_path": "/nowhere/model.onnx"}, "initialise", "bad_request",
         "/nowhere/model.onnx"),
        ({"compiler": "onnxruntime", "exist_onnx_path": "EMPTY"}, "compile", "corrupt_model", "export it again"),
        ({"compiler": "openvinno"}, "compile", "bad_request", "did you mean 'openvino'"),
        (LOADED | {"compiler": "eager"}, "compile", "bad_request", "no_validation"),
        ({"compiler": "onnxruntime", "precision": "bf16", "exist_onnx_path": "TINY"}, "compile", "bad_request",
         "fp32, fp16, int8"),
        ({"compiler": "tensorrt", "exist_onnx_path": "TINY"}, "compile", "engine_missing", "tensorrt"),
        ({"compiler": "onnxruntime", "exist_onnx_path": "TINY",
          "engine_options": {"providers": ["CUDAExecutionProvider"]}}, "compile", "engine_missing",
         "CUDAExecutionProvider"),
        ({"compiler": None, "parameters": {"items": 0}}, "create", "bad_data", "no item"),
        ({"compiler": "eager", "parameters": {"short": True}}, "validate", "wrong_shape", "15 rows for 16 items"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_ends_at_its_step(
    take: Any, tiny_onnx: Path, tmp_path: Path, settings: dict[str, Any], step: str, reason: str, words: str
) -> None:
    (tmp_path / "empty.onnx").touch()
    files = {"TINY": str(tiny_onnx), "EMPTY": str(tmp_path / "empty.onnx")}
    given = {name: files.get(str(value), value) for name, value in settings.items()}
    assert words in _failed(take(**given), InferStep(step), reason)


def test_an_engine_that_does_not_declare_loops_refuses_dependent_steps_before_anything_else(
    take: Any, acme: Any
) -> None:
    job = acme("iterates = False")
    ran = take(job.model_copy(update={"work": job.work.model_copy(update={"iterative": True})}))
    assert "acme_rt" in _failed(ran, InferStep.INITIALISE, "bad_request")


@pytest.mark.parametrize(("what", "value"), [("device", "Another Chip"), ("openvino", "2019.1")])
def test_an_engine_file_of_another_chip_or_version_is_refused(
    take: Any, tiny_onnx: Path, what: str, value: str
) -> None:
    first = take(compiler="openvino", exist_onnx_path=str(tiny_onnx))
    compiled = first.details(InferStep.COMPILE)["engine_file"]
    fingerprint = Path(f"{compiled}.json")
    fingerprint.write_text(json.dumps(json.loads(fingerprint.read_text()) | {what: value}))
    ran = take(compiler="openvino", exist_onnx_path="x", exist_compiler_path=compiled)
    assert f"{what} '{value}'" in _failed(ran, InferStep.INFER, "incompatible_engine")
    assert ran.finished.val_average_acc == first.finished.val_average_acc, "what was validated before is kept"


def test_devices_and_data_that_cannot_be_used_are_named(take: Any, make_job: Any, tmp_path: Path) -> None:
    job = make_job(compiler=None)
    (tmp_path / "empty").mkdir()
    ran = take(job.model_copy(update={"data_dirs": {"data": tmp_path / "empty"}}))
    assert str(tmp_path / "empty") in _failed(ran, InferStep.CREATE, "bad_data")
    ran = take(job.model_copy(update={"device_type": "cuda"}))
    assert "'cuda'" in _failed(ran, InferStep.INITIALISE, "engine_missing")


def test_out_of_memory_says_batch_device_and_what_to_try() -> None:
    context = Context("compiling", "tensorrt", 64, "cuda")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("std::bad_alloc")):
        typed = classify(error, context)
        assert end_reason_of(typed) == "out_of_memory"
        assert "cuda" in str(typed)
        assert "batch 64; try a smaller batch_size" in str(typed)


def test_a_real_failed_allocation_is_out_of_memory(
    take: Any, make_job: Any, acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = take(acme(RETURNS.format(outputs="[torch.empty(2**60, dtype=torch.uint8)]", other_s="0.0")))
    assert "acme_rt on cpu" in _failed(ran, InferStep.INFER, "out_of_memory")
    assert ran.finished.val_average_acc > 0.9, "what was validated before is kept"

    def greedy(self: object, model: object, inputs: object) -> list[torch.Tensor]:
        return [torch.empty(2**60, dtype=torch.uint8)]

    monkeypatch.setattr("accelmark.infer.case.InferCase.model_forward", greedy)
    assert "batch 16; try a smaller batch_size" in _failed(
        take(make_job(compiler=None)), InferStep.VALIDATE, "out_of_memory"
    )


def test_outputs_of_calls_may_be_parts_of_one_buffer_but_not_overlap() -> None:
    pool = torch.zeros(8)
    check_separate_memory([[pool[:4]], [pool[4:]]], "acme")
    with pytest.raises(InferenceError, match="share memory"):
        check_separate_memory([[pool[:4]], [pool[3:7]]], "acme")


@pytest.mark.parametrize("synthetic", [False, True])
def test_nan_that_only_the_engine_makes_is_invalid_beside_a_fine_validation(
    take: Any, acme: Any, *, synthetic: bool
) -> None:
    nan = RETURNS.format(outputs="[torch.full_like(each, float('nan')) for each in outputs]", other_s="other_s")
    finished = take(acme(nan, synthetic=synthetic)).finished
    assert (finished.state, finished.valid) == ("completed", False)
    assert any("NaN" in each for each in finished.invalid_reasons)
    assert finished.p_validation_core > 0
    assert synthetic or finished.val_average_acc > 0.9


@pytest.mark.parametrize("seconds", ["float('nan')", "5.0", "-1e-9"])
@pytest.mark.parametrize("repeat_check", [True, False])
def test_an_engine_that_reports_an_impossible_time_is_named(
    take: Any, acme: Any, seconds: str, *, repeat_check: bool
) -> None:
    ran = take(acme(RETURNS.format(outputs="outputs", other_s=seconds), repeat_check=repeat_check))
    assert "engine acme_rt: reports" in _failed(ran, InferStep.INFER, "error")
    assert ran.finished.p_validation_core > 0
