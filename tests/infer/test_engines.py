from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelmark.infer.engine import InferenceError
from accelmark.infer.engines import engine_class
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, engine_specs, find
from accelmark.spec.settings.inference import InferStep


@pytest.mark.parametrize(
    ("name", "precision", "difference"),
    [
        ("eager", "fp32", 0.0),
        ("eager", "bf16", 0.1),
        pytest.param("aotinductor", "fp32", 1e-4, marks=pytest.mark.heavy),
        ("onnxruntime", "fp32", 1e-4),
        ("onnxruntime", "fp16", 0.02),
        ("onnxruntime", "int8", 0.5),
        ("openvino", "fp32", 1e-4),
        ("openvino", "bf16", 0.1),
    ],
)
def test_an_engine_gives_the_models_answers_for_every_batch_size(
    request_of: Any, name: str, precision: Any, difference: float
) -> None:
    request = request_of(precision=precision)
    engine = engine_class(name, None)(request)
    assert request.model is not None
    for size in (4, 1, 3):
        inputs = [request.example[0][:size]]
        outputs, _ = engine(inputs)
        with torch.inference_mode():
            expected = request.model(*inputs)
        assert [output.device.type for output in outputs] == ["cpu"]
        assert outputs[0].shape == expected.shape
        assert (outputs[0].float() - expected).abs().max() <= difference
    assert engine.describe()
    if name in ("aotinductor", "onnxruntime", "openvino") and precision == "fp32":
        loaded = engine_class(name, None)(request_of(model=None, onnx_path=None, engine_path=engine.file))
        for size in (4, 3):
            inputs = [request.example[0][:size]]
            assert torch.allclose(loaded(inputs)[0][0], engine(inputs)[0][0], atol=1e-5)


def test_openvino_compiles_for_the_batch_size_and_computes_others_too(request_of: Any) -> None:
    request = request_of(optimize_for="throughput")
    engine: Any = engine_class("openvino", None)(request)
    assert (engine.batch_size, engine.any_size) == (4, None)
    assert request.model is not None
    calls = [[request.example[0][:size]] for size in (4, 4, 3, 4, 1, 4)]
    found = [outputs for outputs, _, _ in engine.concurrently(calls)]
    with torch.inference_mode():
        expected = [request.model(*inputs) for inputs in calls]
    assert all(torch.allclose(one[0], other, atol=1e-4) for one, other in zip(found, expected, strict=True))
    assert engine.any_size is not None


@pytest.mark.heavy
def test_inductor_gives_the_models_answers_and_reports_compiling_for_a_new_batch_size(request_of: Any) -> None:
    request = request_of()
    engine = engine_class("inductor", None)(request)
    assert request.model is not None
    with torch.inference_mode():  # as the steps call it
        whole = request.example[0].clone()
        for inputs, is_new in ((whole, False), (whole[:2], True), (whole[:2], False)):
            (outputs,), compiling_s = engine([inputs])
            assert (compiling_s > 0) == is_new
            assert torch.allclose(outputs, request.model(inputs), atol=1e-4)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The providers of the last session of a build of ONNX Runtime with NVIDIA's providers, without a GPU."""
    onnxruntime = pytest.importorskip("onnxruntime")
    opened: list[Any] = []

    def session(path: str, options: Any, providers: list[Any]) -> Any:
        opened[:] = providers
        return SimpleNamespace(
            get_providers=lambda: [name for name, _ in providers],
            get_inputs=lambda: [SimpleNamespace(name="input")],
            get_outputs=lambda: [SimpleNamespace(name="logits")],
        )

    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    return opened


@pytest.mark.parametrize(("precision", "options"), [("fp32", {"use_tf32": "0"}), ("fp16", {})])
def test_fp32_on_cuda_is_not_tf32(request_of: Any, opened: list[Any], precision: Any, options: dict[str, str]) -> None:
    engine_class("onnxruntime", None)(request_of(precision=precision, device_type="cuda"))
    assert opened == [("CUDAExecutionProvider", options)]


def test_a_provider_without_fp32_is_refused_unless_the_environment_enables_it(
    request_of: Any, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"providers": ("TensorrtExecutionProvider", "CUDAExecutionProvider")}
    request = request_of(device_type="cuda", options=named)
    with pytest.raises(InferenceError, match="NVIDIA_TF32_OVERRIDE=0"):
        engine_class("onnxruntime", None)(request)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    engine_class("onnxruntime", None)(request)
    assert opened == [("TensorrtExecutionProvider", {}), ("CUDAExecutionProvider", {"use_tf32": "0"})]


@pytest.mark.parametrize(
    ("name", "vendor", "package"),
    [
        ("tensorrt", None, "tensorrt"),
        ("torch_tensorrt", None, "torch_tensorrt"),
        ("ixrt", "iluvatar", "tensorrt"),
        ("xtcl", "kunlunxin", "tvm"),
    ],
)
def test_an_engine_whose_package_is_absent_says_what_to_do(
    request_of: Any, name: str, vendor: str | None, package: str
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    folder = find("vendors", vendor).path if vendor is not None else None
    assert name in engine_specs(folder)
    with pytest.raises(InferenceError, match=f"{package} cannot be imported.*install it"):
        engine_class(name, folder)(request_of())


_VENDOR_ENGINE = '''
"""A vendor's engine: its runtime is played by the model's own framework."""

from accelmark.infer.engines.eager import Engine as Eager


class Engine(Eager):
    def describe(self):
        return {"acme_compiler": "1.0"}
'''


def test_an_installed_package_adds_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_engines.py").write_text(_VENDOR_ENGINE)
    metadata = tmp_path / "acme_engines-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engines\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[accelmark.engines]\nacmepkg = acme_engines:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engine_class("acmepkg", None).__module__ == "acme_engines"


_FLAGPERF = '''
"""In the form of FlagPerf's inference_engine files: one reads the ONNX file, one compiles the model."""

import time

import onnxruntime
import torch


class InferModel:
    def __init__(self, config, onnx_path, model):
        assert config._fields and config.batch_size and not config.fp16 and config.acme_level == 3
        assert config.trt_tmp_path is None and config.has_dynamic_axis is None
        assert (model is None) == (onnx_path is not None)
        self.model = model
        if model is None:
            self.session = onnxruntime.InferenceSession(onnx_path, providers=["CPUExecutionProvider"])

    def __call__(self, model_inputs: list):
        start = time.time()
        foo_time = time.time() - start
        if self.model is not None:
            return [self.model(model_inputs[0])], foo_time
        names = [each.name for each in self.session.get_inputs()]
        given = dict(zip(names, (each.numpy() for each in model_inputs)))
        return [torch.from_numpy(each) for each in self.session.run(None, given)], foo_time
'''


@pytest.mark.parametrize("has_file", [True, False], ids=["onnx file", "model"])
def test_an_engine_of_flagperf_runs_unchanged(acme: Any, take: Any, tiny_onnx: Path, *, has_file: bool) -> None:
    given = {"engine_options": {"acme_level": 3}, "exist_onnx_path": str(tiny_onnx) if has_file else "foo"}
    job = acme("pass", **given)
    (Path(os.environ[PLUGINS_VARIABLE]) / "vendors" / "acme" / "engines" / "acme_rt.py").write_text(_FLAGPERF)
    ran = take(job)
    assert ran.finished.state == "completed", ran.finished
    assert ran.finished.infer_average_acc == pytest.approx(ran.finished.val_average_acc, abs=0.02)
    details = ran.details(InferStep.COMPILE)
    assert details["engine_code"] == "engines/acme_rt.py"
    assert ("onnx_sha256" in details) == has_file


def test_nothing_is_exported_for_an_engine_that_compiles_the_model(take: Any) -> None:
    ran = take(compiler="eager")
    assert ran.states() == dict.fromkeys(InferStep, "done") | {InferStep.EXPORT: "skipped"}
    assert not (ran.node_dir / "engine" / "model.onnx").exists()
