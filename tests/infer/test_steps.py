"""The seven steps; mistakes of people and machines, and the end of each run: its step, its reason, what it names."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.infer.engine import (
    Context,
    EngineRequest,
    InferenceError,
    check_separate_memory,
    classify,
    end_reason_of,
)
from accelmark.infer.engine_process import EngineProcess
from accelmark.infer.run import batches_of, build_case
from accelmark.spec.log.events import Event
from accelmark.spec.settings.inference import InferStep
from tests.run.fakes import wait_for

_ALL = dict.fromkeys(InferStep, "done")
LOADED = {"no_validation": True, "exist_onnx_path": "x"}
RETURNS = """
def __call__(self, inputs):
    outputs, other_s = super().__call__(inputs)
    return {outputs}, {other_s}
"""


def test_the_standard_case_takes_all_seven_steps_and_keeps_its_accuracy(take: Any) -> None:
    ran = take(compiler="onnxruntime")
    assert ran.states() == _ALL
    finished = ran.finished
    assert finished.state == "completed"
    assert finished.valid
    assert 0.9 < finished.val_average_acc < 1.0
    assert finished.infer_average_acc == pytest.approx(finished.val_average_acc, abs=0.02)
    assert finished.p_inference_core > finished.p_inference_whole > 0
    assert finished.compile_time > 0
    assert (ran.node_dir / "engine" / "model.onnx").is_file()


@pytest.mark.parametrize("synthetic", [False, True])
def test_int8_is_calibrated_on_other_items_than_those_that_are_measured(
    take: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch, *, synthetic: bool
) -> None:
    given: list[Any] = []

    def seen(self: EngineProcess, request: EngineRequest, modules: Any) -> Any:
        given.extend([request.example[0], request.calibration[0]])
        return compiled(self, request, modules)

    compiled = EngineProcess.compile
    monkeypatch.setattr(EngineProcess, "compile", seen)
    ran = take(compiler="onnxruntime", precision="int8", synthetic=synthetic)
    assert ran.finished.state == "completed", ran.finished.message
    example, images = given
    case = build_case(job := make_job(synthetic=synthetic), job.work, ran.node_dir)
    measured = torch.cat([batch.inputs[0] for batch in batches_of(case, pinned=False)])
    assert images.shape == (32, 1, 8, 8), "also with smaller batches"
    assert torch.equal(example, images[:16])
    assert not any(torch.equal(one, other) for one in images for other in measured)


def test_without_a_compiler_only_the_framework_is_measured_in_passes_and_windows(take: Any) -> None:
    ran = take(compiler=None, repeat=3, log_freq=3, warmup_batches=4)
    ends, windows = ran.of(Event.STAGE_END), ran.of(Event.FORWARD)
    assert [end.number for end in ends] == list(range(1, 8))
    assert all(end.duration_s > 0 for end in ends if end.state == "done")
    assert [(window.pass_number, len(window.items)) for window in windows[:4]] == [(1, 3), (1, 3), (1, 1), (2, 3)]
    assert sum(sum(window.items) for window in windows) == 300
    (warmed,) = ran.of(Event.WARMUP)
    assert len(warmed.calls_ms) == 4
    skipped = {InferStep.EXPORT, InferStep.COMPILE, InferStep.INFER}
    assert ran.states() == _ALL | dict.fromkeys(skipped, "skipped")
    assert ran.finished.p_inference_core is None
    assert ran.finished.p_validation_core > 0
    assert {end.reason for end in ran.of(Event.STAGE_END) if end.state == "skipped"} == {"compiler is null"}


def test_without_validation_its_figures_are_null_and_the_onnx_file_is_compiled(take: Any, tiny_onnx: Path) -> None:
    ran = take(compiler="onnxruntime", no_validation=True, exist_onnx_path=str(tiny_onnx))
    assert ran.states() == _ALL | {InferStep.VALIDATE: "skipped", InferStep.EXPORT: "skipped"}
    assert ran.finished.p_validation_core is None
    assert ran.finished.val_average_acc is None
    assert ran.finished.infer_average_acc > 0.9


def test_an_existing_engine_goes_from_the_data_to_inference(take: Any, tiny_onnx: Path) -> None:
    first = take(compiler="openvino", exist_onnx_path=str(tiny_onnx))
    compiled = first.details(InferStep.COMPILE)["engine_file"]
    ran = take(compiler="openvino", no_validation=True, exist_onnx_path="foo", exist_compiler_path=compiled)
    skipped = {InferStep.VALIDATE, InferStep.EXPORT, InferStep.COMPILE}
    assert ran.states() == _ALL | dict.fromkeys(skipped, "skipped")
    assert ran.finished.compile_time is None
    assert ran.finished.infer_average_acc == pytest.approx(first.finished.infer_average_acc, abs=0.03)


def test_the_engine_computes_for_the_duration_and_short_passes_share_a_window(take: Any) -> None:
    ran = take(compiler="eager", inference_duration_s=0.5, max_batches=2, parameters={"items": 40})
    windows = ran.windows()
    assert sum(sum(window.latency_ms) for window in windows) >= 0.9 * 500
    assert max(len(window.items) for window in windows) > 2, "32 items are two calls, far less than half a second"
    num_items = sum(sum(window.items) for window in windows)
    assert num_items % 32 == 0, "whole passes"
    (evaluated,) = [each for each in ran.of(Event.EVALUATE) if each.phase == "inference"]
    assert evaluated.num_items == num_items
    assert ran.finished.valid, ran.finished.invalid_reasons
    (check,) = ran.of(Event.REPEAT_CHECK)
    assert check.num_batches >= 6


def test_each_item_of_the_data_is_compared_once_in_the_first_pass(take: Any) -> None:
    ran = take(compiler="eager", repeat=4)
    (check,) = ran.of(Event.ANSWER_CHECK)
    assert check.num_not_compared > 0
    assert check.num_items + check.num_not_compared >= 400
    assert check.num_scored == 100, "the items of the data, also where later passes share windows"
    assert sum(ran.windows()[0].items) == 100


def test_the_last_batch_is_prepared_for_while_warming_up(take: Any, acme: Any) -> None:
    compiles = """
    fixed_batch = True
    def __call__(self, inputs):
        known = self.__dict__.setdefault("known", set())
        compiling_s = 0.0 if len(inputs[0]) in known else 1e-9
        known.add(len(inputs[0]))
        return super().__call__(inputs)[0], compiling_s
    """
    ran = take(acme(compiles, max_batches=7, repeat_check=False))
    inference = ran.windows()
    assert sum(sum(window.items) for window in inference) == 100
    assert sorted(size for window in inference for size in window.items)[:2] == [4, 16]
    assert sum(sum(window.not_inference_ms) for window in inference) == 0


def test_an_option_that_the_engine_does_not_know_is_warned_of(take: Any, tiny_onnx: Path) -> None:
    options = {"spining": True, "providers": "CPUExecutionProvider"}
    ran = take(compiler="onnxruntime", exist_onnx_path=str(tiny_onnx), engine_options=options)
    (warning,) = map(str, ran.of(Event.WARNING))
    assert "engine_options.spining: unknown option of the engine onnxruntime (did you mean 'spinning'?)" in warning
    assert ran.finished.state == "completed"


def test_synthetic_data_measures_speed_only(take: Any) -> None:
    ran = take(compiler="eager", synthetic=True)
    assert ran.finished.infer_average_acc is None
    assert ran.finished.p_inference_core > 0
    assert ran.finished.valid


def test_an_accuracy_outside_the_tolerance_makes_the_run_invalid(take: Any, acme: Any) -> None:
    # As when the file of another model is named.
    finished = take(acme("def compute(self, inputs):\n    return [-each for each in super().compute(inputs)]")).finished
    assert not finished.valid
    assert "difference of more than 0.02" in finished.invalid_reasons[0]


def test_an_accuracy_far_from_the_reference_makes_the_run_invalid(take: Any, make_job: Any) -> None:
    job = make_job(compiler=None)
    reference = {"value": 0.5, "within": 0.01, "source": "made up for this test"}
    infer = job.work.model_validate(job.work.model_dump() | {"reference": reference})
    finished = take(job.model_copy(update={"work": infer})).finished
    assert not finished.valid
    assert "the reference is 0.5" in finished.invalid_reasons[0]


def test_a_cancelled_process_keeps_the_earlier_results(make_job: Any, start: Any) -> None:
    process, log = start(make_job(compiler=None, repeat=10_000_000))
    wait_for(lambda: log.is_file() and '"FORWARD"' in log.read_text(encoding="utf-8"), "a window")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    last = log.read_text(encoding="utf-8").splitlines()[-1]
    assert '"state": "cancelled"' in last
    assert '"failed_step": "validate"' in last


def test_windows_are_timed_by_the_rank_and_calls_add_up_to_them(take: Any) -> None:
    ran = take(compiler="eager", batch_size=1, repeat_check=False)
    window = ran.windows()[0]
    assert len(window.items) == 100
    assert 0 < window.crossing_ms < sum(window.latency_ms)
    assert sum(window.latency_ms) <= window.wall_ms


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
