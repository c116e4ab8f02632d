"""What people and machines get wrong, and the end each comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from accelmark.infer.failures import Context, classify, end_reason_of
from accelmark.infer.hashes import file_hash
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from accelmark.spec.settings.inference import InferStep

_ENGINE = """
import torch
from accelmark.infer.engines.eager import Engine as Eager

class Engine(Eager):
    def __call__(self, inputs):
        outputs, other_s = super().__call__(inputs)
        return {outputs}, {other_s}
"""
"""A vendor's engine, its runtime played by the framework; what it returns is a test's matter."""


@pytest.fixture
def acme_job(make_job: Any, tiny_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a job of a vendor whose folder holds engines of its own."""
    engines = tmp_path / "plugins" / "vendors" / "acme" / "engines"
    engines.mkdir(parents=True)
    vendor = {
        "name": "acme",
        "title": "Acme",
        "frameworks": {"pytorch": {"device_type": "cpu", "collective_backend": "gloo"}},
    }
    (engines.parent / "vendor.yaml").write_text(json.dumps(vendor | {"visible_devices_env": "ACME", "chips": []}))
    returned = {
        "acme_rt": "outputs",
        "acme_nothing": "[]",
        "acme_numpy": "[each.numpy() for each in outputs]",
        "acme_meta": "[each.to('meta') for each in outputs]",
        "acme_one": "outputs[0]",
        "acme_reuse": "[self.__dict__.setdefault('held', torch.empty(16, 10))[:len(outputs[0])].copy_(outputs[0])]",
        "acme_nan": "[torch.full_like(each, float('nan')) for each in outputs]",
        "acme_greedy": "[torch.empty(2**60, dtype=torch.uint8)]",
    }
    for name, outputs in returned.items():
        (engines / f"{name}.py").write_text(_ENGINE.format(outputs=outputs, other_s="other_s"))
    for name, other_s in {"acme_nan_s": "float('nan')", "acme_long_s": "5.0", "acme_minus_s": "-1e-9"}.items():
        (engines / f"{name}.py").write_text(_ENGINE.format(outputs="outputs", other_s=other_s))
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "plugins"))
    exported = {"exist_onnx_path": str(tiny_onnx)}
    return lambda **settings: make_job(**(exported | settings)).model_copy(update={"vendor": "acme"})


def _failed(ran: Any, step: InferStep, end_reason: str) -> str:
    assert ran.finished.state == "failed"
    assert ran.finished.end_reason == end_reason
    assert ran.finished.failed_step is step
    assert not ran.finished.valid
    return str(ran.finished.message)


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("part", ["rubbish", "cut short"])
def test_a_corrupt_onnx_file(take: Any, tmp_path: Path, tiny_onnx: Path, compiler: str, part: str) -> None:
    path = tmp_path / "corrupt.onnx"
    whole = tiny_onnx.read_bytes()
    path.write_bytes(b"\x00rubbish" * 100 if part == "rubbish" else whole[: len(whole) // 2])
    ran = take(compiler=compiler, exist_onnx_path=str(path))
    assert "corrupt.onnx" in _failed(ran, InferStep.COMPILE, "corrupt_model")
    assert ran.finished.p_validation_core > 0


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino"])
def test_an_empty_onnx_file(take: Any, tmp_path: Path, compiler: str) -> None:
    path = tmp_path / "empty.onnx"
    path.touch()
    assert "empty.onnx" in _failed(
        take(compiler=compiler, no_validation=True, exist_onnx_path=str(path)), InferStep.COMPILE, "corrupt_model"
    )


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino", "aotinductor"])
def test_a_directory_is_no_engine_file(take: Any, tmp_path: Path, compiler: str) -> None:
    ran = take(compiler=compiler, no_validation=True, exist_onnx_path="x", exist_compiler_path=str(tmp_path))
    assert str(tmp_path) in _failed(ran, InferStep.INFER, "incompatible_engine")


@pytest.mark.parametrize("text", ["[1]", "null", "rubbish"])
def test_a_fingerprint_that_is_not_one(take: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "engine.blob"
    path.write_bytes(b"whatever")
    path.with_name("engine.blob.json").write_text(text)
    ran = take(compiler="openvino", no_validation=True, exist_onnx_path="x", exist_compiler_path=str(path))
    assert "engine.blob.json: not " in _failed(ran, InferStep.INFER, "incompatible_engine")


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino"])
def test_an_operator_that_the_engine_lacks_is_named(take: Any, tmp_path: Path, compiler: str) -> None:
    path = tmp_path / "odd.onnx"
    image = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1, 8, 8])
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 1, 8, 8])
    node = helper.make_node("FrobnicateLinear", ["input"], ["output"], domain="com.example")
    graph = helper.make_graph([node], "odd", [image], [output])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    ran = take(compiler=compiler, exist_onnx_path=str(path))
    assert "FrobnicateLinear" in _failed(ran, InferStep.COMPILE, "unsupported_operator")


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino"])
def test_wrong_shapes(take: Any, tmp_path: Path, compiler: str) -> None:
    path = tmp_path / "wide.onnx"
    image = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 32, 32])
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 3, 32, 32])
    graph = helper.make_graph([helper.make_node("Relu", ["input"], ["output"])], "wide", [image], [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    _failed(take(compiler=compiler, exist_onnx_path=str(path)), InferStep.INFER, "wrong_shape")


def test_an_engine_file_that_is_not_there(take: Any) -> None:
    ran = take(compiler="openvino", no_validation=True, exist_onnx_path="x", exist_compiler_path="/nowhere/x.blob")
    assert "/nowhere/x.blob" in _failed(ran, InferStep.INITIALISE, "incompatible_engine")


@pytest.mark.parametrize("compiler", ["eager", "inductor", "torch_tensorrt"])
def test_an_engine_that_loads_no_file_refuses_one_before_anything_else(
    take: Any, tmp_path: Path, compiler: str
) -> None:
    path = tmp_path / "engine.bin"
    path.write_bytes(b"whatever")
    ran = take(compiler=compiler, exist_compiler_path=str(path))
    message = _failed(ran, InferStep.INITIALISE, "bad_request")
    assert message.startswith(f"exist_compiler_path: the engine {compiler} ")


def test_an_engine_that_does_not_declare_loops_refuses_dependent_steps_before_anything_else(
    take: Any, acme: Any
) -> None:
    job = acme("iterates = False")
    ran = take(job.model_copy(update={"work": job.work.model_copy(update={"iterative": True})}))
    assert "acme_rt compiles one static graph" in _failed(ran, InferStep.INITIALISE, "bad_request")


def test_an_onnx_file_that_does_not_exist_is_reported_first(take: Any, tmp_path: Path) -> None:
    missing = take(compiler="onnxruntime", exist_onnx_path="/nowhere/model.onnx")
    assert "/nowhere/model.onnx does not exist" in _failed(missing, InferStep.INITIALISE, "bad_request")
    directory = take(compiler="openvino", exist_onnx_path=str(tmp_path))
    assert f"{tmp_path} is not a file" in _failed(directory, InferStep.INITIALISE, "bad_request")


def test_a_missing_file_cannot_be_hashed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.onnx: does not exist"):
        file_hash(tmp_path / "gone.onnx")


@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino", "aotinductor"])
def test_an_engine_file_that_is_damaged(take: Any, tmp_path: Path, compiler: str) -> None:
    path = tmp_path / "engine.bin"
    path.write_bytes(b"not an engine" * 50)
    ran = take(compiler=compiler, no_validation=True, exist_onnx_path="x", exist_compiler_path=str(path))
    assert "compile it again" in _failed(ran, InferStep.INFER, "incompatible_engine")


@pytest.mark.parametrize(("what", "value"), [("device", "Another Chip"), ("openvino", "2019.1"), ("precision", "bf16")])
def test_an_engine_file_of_another_chip_or_version_is_refused(
    take: Any, tiny_onnx: Path, what: str, value: str
) -> None:
    first = take(compiler="openvino", exist_onnx_path=str(tiny_onnx))
    compiled = next(end for end in first.of(Event.STAGE_END) if end.step is InferStep.COMPILE).details["engine_file"]
    fingerprint = Path(f"{compiled}.json")
    recorded = json.loads(fingerprint.read_text())
    fingerprint.write_text(json.dumps(recorded | {what: value}))
    ran = take(compiler="openvino", exist_onnx_path="x", exist_compiler_path=compiled)
    message = _failed(ran, InferStep.INFER, "incompatible_engine")
    assert f"{what} '{value}' instead of" in message
    assert "compile it again" in message
    assert ran.finished.val_average_acc == first.finished.val_average_acc, "what was validated before is kept"


def test_an_empty_data_directory(take: Any, make_job: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = take(make_job(compiler=None).model_copy(update={"data_dirs": {"data": empty}}))
    assert str(empty) in _failed(ran, InferStep.CREATE, "bad_data")


def test_data_without_items(take: Any, make_job: Any) -> None:
    _failed(take(make_job(compiler=None, parameters={"items": 0})), InferStep.CREATE, "bad_data")


def test_out_of_memory_says_batch_device_and_what_to_try() -> None:
    context = Context("compiling", "tensorrt", 64, "cuda")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("std::bad_alloc")):
        typed = classify(error, context)
        assert end_reason_of(typed) == "out_of_memory"
        assert "batch 64; try batch_size 32" in str(typed)
        assert "cuda" in str(typed)


def test_a_real_failed_allocation_is_out_of_memory(take: Any, make_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: object, model: object, inputs: object) -> list[torch.Tensor]:
        return [torch.empty(2**60, dtype=torch.uint8)]

    monkeypatch.setattr("accelmark.infer.case.InferCase.model_forward", greedy)
    message = _failed(take(make_job(compiler=None)), InferStep.VALIDATE, "out_of_memory")
    assert "try batch_size 8" in message


def test_out_of_memory_in_the_engine_keeps_what_was_validated(take: Any, acme_job: Any) -> None:
    ran = take(acme_job(compiler="acme_greedy"))
    message = _failed(ran, InferStep.INFER, "out_of_memory")
    assert "acme_greedy on cpu" in message
    assert "at batch 16; try batch_size 8" in message
    assert ran.finished.val_average_acc > 0.9
    assert ran.finished.p_validation_core > 0


@pytest.mark.parametrize("synthetic", [False, True])
def test_nan_that_only_the_engine_makes_is_invalid_beside_a_fine_validation(
    take: Any, acme_job: Any, *, synthetic: bool
) -> None:
    finished = take(acme_job(compiler="acme_nan", synthetic=synthetic)).finished
    assert (finished.state, finished.valid) == ("completed", False)
    assert any("batches have NaN or infinite outputs" in each for each in finished.invalid_reasons)
    assert finished.p_validation_core > 0
    assert synthetic or finished.val_average_acc > 0.9


@pytest.mark.parametrize("synthetic", [False, True])
def test_short_rows_of_the_framework_end_the_run_in_the_validation(
    take: Any, make_job: Any, *, synthetic: bool
) -> None:
    ran = take(make_job(compiler="eager", parameters={"short": True}, synthetic=synthetic))
    assert "the model returned 15 rows for 16 items" in _failed(ran, InferStep.VALIDATE, "wrong_shape")


def test_a_vendors_engine_takes_the_steps_like_any_other(take: Any, acme_job: Any) -> None:
    ran = take(acme_job(compiler="acme_rt"))
    assert ran.finished.valid, ran.finished.invalid_reasons
    assert ran.finished.infer_average_acc == pytest.approx(ran.finished.val_average_acc, abs=0.03)
    compiled = next(end for end in ran.of(Event.STAGE_END) if end.step is InferStep.COMPILE)
    assert compiled.details["dtype"] == "torch.float32"


def test_a_device_without_a_known_provider_says_where_to_set_one(take: Any, make_job: Any, tiny_onnx: Path) -> None:
    job = make_job(compiler="onnxruntime", no_validation=True, exist_onnx_path=str(tiny_onnx))
    ran = take(job.model_copy(update={"device_type": "gcu"}))
    assert "engine_options.providers" in _failed(ran, InferStep.COMPILE, "engine_missing")


def test_a_provider_can_be_set_for_any_device(take: Any, make_job: Any, tiny_onnx: Path) -> None:
    options = {"providers": ["CPUExecutionProvider"]}
    job = make_job(compiler="onnxruntime", no_validation=True, exist_onnx_path=str(tiny_onnx), engine_options=options)
    assert take(job.model_copy(update={"device_type": "gcu"})).finished.infer_average_acc > 0.9


def test_an_engine_that_is_not_installed_is_an_error(take: Any, tiny_onnx: Path) -> None:
    ran = take(compiler="tensorrt", exist_onnx_path=str(tiny_onnx))
    assert "tensorrt is not available" in _failed(ran, InferStep.COMPILE, "engine_missing")


def test_a_missing_provider_never_falls_back_to_the_cpu(take: Any, tiny_onnx: Path) -> None:
    options = {"providers": ["CUDAExecutionProvider"]}
    ran = take(compiler="onnxruntime", exist_onnx_path=str(tiny_onnx), engine_options=options)
    assert "CUDAExecutionProvider" in _failed(ran, InferStep.COMPILE, "engine_missing")


def test_an_unknown_engine_comes_with_the_nearest_name(take: Any) -> None:
    message = _failed(take(compiler="openvinno"), InferStep.COMPILE, "bad_request")
    assert "did you mean 'openvino'" in message


def test_a_precision_that_the_engine_lacks(take: Any, tiny_onnx: Path) -> None:
    ran = take(compiler="onnxruntime", precision="bf16", exist_onnx_path=str(tiny_onnx))
    assert "it supports fp32, fp16, int8" in _failed(ran, InferStep.COMPILE, "bad_request")


def test_an_engine_that_needs_the_model_fails_without_one(take: Any) -> None:
    ran = take(compiler="eager", no_validation=True, exist_onnx_path="x")
    assert "set no_validation to false" in _failed(ran, InferStep.COMPILE, "bad_request")


def test_a_device_that_pytorch_cannot_use(take: Any, make_job: Any) -> None:
    ran = take(make_job(compiler=None).model_copy(update={"device_type": "cuda"}))
    assert "PyTorch cannot use device 'cuda'" in _failed(ran, InferStep.INITIALISE, "engine_missing")


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Celu(12) node", "Celu"),
        ("No importer registered for op: RotaryEmbedding", "RotaryEmbedding"),
    ],
)
def test_operators_are_named_from_other_runtimes_messages(text: str, operator: str) -> None:
    typed = classify(RuntimeError(text), Context("compiling", "x", 1, "cpu"))
    assert end_reason_of(typed) == "unsupported_operator"
    assert f"operator {operator} is not supported;" in str(typed)


@pytest.mark.parametrize("compiler", ["acme_nan_s", "acme_long_s", "acme_minus_s"])
@pytest.mark.parametrize("repeat_check", [True, False])
def test_an_engine_that_reports_an_impossible_time_is_named(
    take: Any, acme_job: Any, compiler: str, repeat_check: bool
) -> None:
    ran = take(acme_job(compiler=compiler, repeat_check=repeat_check))
    assert f"engine {compiler}: reports" in _failed(ran, InferStep.INFER, "error")
    assert ran.finished.p_validation_core > 0


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("acme_nothing", "returns nothing"),
        ("acme_numpy", "returns a ndarray among its outputs"),
        ("acme_meta", "returns a tensor on meta among its outputs"),
        ("acme_one", "returns a Tensor;"),
        ("acme_reuse", "outputs of two calls share memory"),
    ],
)
def test_an_engine_that_overwrites_its_outputs_is_named(take: Any, acme_job: Any, compiler: str, words: str) -> None:
    ran = take(acme_job(compiler=compiler))
    assert f"engine {compiler}: {words}" in _failed(ran, InferStep.INFER, "error")
    assert ran.finished.infer_average_acc is None
