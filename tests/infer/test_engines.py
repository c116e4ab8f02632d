"""Engines and their options, and engines that compute several calls at the same time."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save

from accelmark.infer.engine import EngineRequest, InferenceError
from accelmark.infer.engines import engine_class
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, engine_specs, find
from accelmark.spec.settings.inference import InferSettings, InferStep
from tests.infer import toy_tensorrt


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
    for size in (4, 1, 3):
        outputs, _ = engine([request.example[0][:size]])
        expected = _expected(request, size)
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
    sizes = (4, 4, 3, 4, 1, 4)
    found = [outputs for outputs, _, _ in engine.concurrently([[request.example[0][:size]] for size in sizes])]
    for outputs, size in zip(found, sizes, strict=True):
        assert torch.allclose(outputs[0], _expected(request, size), atol=1e-4)
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


def test_an_installed_package_adds_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from accelmark.infer.engines import eager\n\nclass Engine(eager.Engine): ...\n"
    (tmp_path / "acme_engines.py").write_text(source)
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


def _answers(engine: Any, request: EngineRequest, size: int) -> torch.Tensor:
    with torch.inference_mode():
        (found,), _ = engine([each[:size] for each in request.example])
    return torch.as_tensor(found).float()


def _expected(request: EngineRequest, size: int) -> torch.Tensor:
    assert request.model is not None
    with torch.inference_mode():
        found: torch.Tensor = request.model(*(each[:size] for each in request.example))
    return found


@pytest.mark.parametrize("vendor", [None, "iluvatar", "kunlunxin"])
def test_what_an_engine_reads_and_computes_is_declared_for_doctor_and_documentation(vendor: str | None) -> None:
    folder = find("vendors", vendor).path if vendor else None
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "inference.md").read_text()
    for name, spec in engine_specs(folder).items():
        engine = engine_class(name, folder)
        assert spec.generates == engine.generates, name
        assert vendor is not None or spec.precisions == engine.precisions, name
        assert set(spec.options) == set(engine.known_options or ()), name
        assert all(f"`{option}`" in guide for option in spec.options), name
        assert {key.removeprefix("engine_options.") for key in spec.tunes if "." in key} <= set(spec.options), name


@pytest.mark.parametrize(
    "options",
    [
        {"io_binding": True},
        {"io_binding": True, "streams": 2},
        {"graph_level": "disabled"},
        {"graph_level": "layout"},
        {"execution_mode": "parallel", "inter_op_threads": 2, "spinning": True},
    ],
)
def test_onnx_runtime_answers_as_the_model_with_each_option(request_of: Any, options: dict[str, Any]) -> None:
    request = request_of(options=options, threads=2)
    engine = engine_class("onnxruntime", None)(request)
    first = _answers(engine, request, 4)
    for size in (4, 3, 4, 3):
        assert torch.allclose(_answers(engine, request, size), _expected(request, size), atol=1e-4)
    assert torch.allclose(first, _expected(request, 4), atol=1e-4), "outputs belong to the caller"
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: _answers(engine, request, 4), range(8)))
    assert all(torch.equal(each, first) for each in found)


def test_channels_last_changes_the_memory_format_on_the_cpu(request_of: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()).eval()
    image = torch.randn(2, 3, 8, 8)
    request = request_of(model=model, example=(image,), options={"channels_last": True})
    engine: Any = engine_class("eager", None)(request)
    (given,) = engine.to_device([image])
    assert given.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(_answers(engine, request, 2), _expected(request, 2), atol=1e-5)


def test_cuda_graphs_record_each_shape_once_and_replay_it(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_tensorrt.play_cuda(monkeypatch)
    request = request_of(options={"cuda_graphs": True})
    engine: Any = engine_class("eager", None)(request)
    found = [_answers(engine, request, size) for size in (4, 3, 4, 4)]
    for answers, size in zip(found, (4, 3, 4, 4), strict=True):
        assert torch.allclose(answers, _expected(request, size), atol=1e-5)
    assert toy_tensorrt.Graph.replays == 4
    assert len(engine.run_on_device.recordings) == 2
    with torch.inference_mode():
        (other,), _ = engine([torch.zeros_like(request.example[0])])
        assert request.model is not None
        assert torch.allclose(other, request.model(torch.zeros_like(request.example[0])), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}, {"streams": 2}, {"streams": 2, "cuda_graphs": True}])
def test_tensorrt_with_graphs_and_several_contexts(
    request_of: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", toy_tensorrt)
    toy_tensorrt.play_cuda(monkeypatch)
    engine: Any = engine_class("tensorrt", None)(request := request_of(options=options))
    assert engine.concurrency == options.get("streams", 1)
    for size in (4, 2, 4):
        assert torch.allclose(_answers(engine, request, size), _expected(request, size), atol=1e-4)
    held = [engine.contexts.get() for _ in range(engine.concurrency)]
    assert len({id(each.context) for each in held}) == engine.concurrency
    assert (toy_tensorrt.Graph.replays > 0) == ("cuda_graphs" in options)
    assert len({context for context, _ in toy_tensorrt.ToyEngine.enqueued}) == engine.concurrency
    for each in held:
        engine.contexts.put(each)
    loaded = engine_class("tensorrt", None)(request_of(model=None, onnx_path=None, engine_path=engine.file))
    assert torch.allclose(_answers(loaded, request, 4), _expected(request, 4), atol=1e-4)


def _onnx(
    tmp_path: Path, inputs: dict[str, int], outputs: dict[str, int], nodes: list[tuple[str, list[str], str]], *more: Any
) -> Path:
    """Write an ONNX file: its inputs and outputs with their widths, and (type, inputs, output) of each node."""
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in each.items()]
        for each in (inputs, outputs)
    ]
    made = [helper.make_node(kind, names, [output]) for kind, names, output in nodes]
    graph = helper.make_graph(made, "graph", tensors[0], tensors[1], *more)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "graph.onnx")
    return tmp_path / "graph.onnx"


@pytest.mark.parametrize(
    ("name", "options"),
    [("onnxruntime", {}), ("onnxruntime", {"io_binding": True}), ("openvino", {}), ("tensorrt", {})],
)
def test_inputs_and_outputs_are_bound_by_name(
    request_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", toy_tensorrt)
    toy_tensorrt.play_cuda(monkeypatch)
    left, right = torch.full((2, 3), 5.0), torch.full((2, 3), 3.0)
    given = {"example": (left, right), "model": None, "options": options, "output_names": ("difference", "twice")}
    nodes = [("Sub", ["left", "right"], "difference"), ("Add", ["difference", "difference"], "twice")]
    path = _onnx(tmp_path, {"right": 3, "left": 3}, {"twice": 3, "difference": 3}, nodes)
    request = request_of(onnx_path=path, **given, input_names=("left", "right"))
    for _ in range(2):
        outputs, _ = engine_class(name, None)(request)([left, right])
        assert [float(np.unique(each.numpy())[0]) for each in outputs] == [2.0, 4.0]


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_data_for_calibration_is_given_by_name(request_of: Any, tmp_path: Path, name: str) -> None:
    weight = numpy_helper.from_array(np.ones((3, 5), np.float32), "weight")
    nodes = [("MatMul", ["row", "weight"], "product"), ("Add", ["product", "bias"], "sum")]
    path = _onnx(tmp_path, {"bias": 5, "row": 3}, {"sum": 5}, nodes, [weight])  # the file's order is not the case's
    items = torch.rand(32, 3), torch.rand(32, 5)
    names: dict[str, Any] = {"input_names": ("row", "bias"), "output_names": ("sum",)}
    request = request_of(onnx_path=path, precision="int8", model=None, example=items, calibration=items, **names)
    (found,), _ = engine_class(name, None)(request)(list(items))
    assert torch.allclose(torch.as_tensor(found), items[0].sum(1, keepdim=True) + items[1], atol=0.05)


_TWO = """
    def __init__(self, request):
        super().__init__(request)
        self.concurrency = 2
        self.active = self.started = 0
        self.lock = threading.Lock()

    def __call__(self, inputs):
        with self.lock:
            self.active += 1
            self.started += 1
        {0}
        print("together", self.active, flush=True)
        with torch.inference_mode():
            found = super().__call__(inputs)
        with self.lock:
            self.active -= 1
        return found
"""
_LOADGEN = {"scenario_duration_s": 0.2, "scenario_queries": 20, "server_latency_bound_ms": 1000}


def test_calls_overlap_and_fill_the_window(take: Any, acme: Any) -> None:
    ran = take(acme(_TWO.format("time.sleep(0.05)")))
    assert ran.finished.state == "completed", ran.finished.message
    assert "together 2" in (ran.node_dir / "engine.out.log").read_text()
    windows = ran.windows()
    computed_ms = sum(window.computed_ms for window in windows)
    assert sum(sum(window.latency_ms) for window in windows) > computed_ms, (
        "latencies of calls at the same time overlap"
    )
    items = sum(sum(window.items) for window in windows)
    assert ran.finished.p_inference_core == pytest.approx(items / computed_ms * 1000)
    (answers,) = ran.of(Event.ANSWER_CHECK)
    assert answers.worst_error < 1e-5
    assert answers.num_items >= 100


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.heavy)])
def test_streams_answer_as_the_framework_does_also_under_load(take: Any, engine: str) -> None:
    pytest.importorskip(engine)
    ran = take(compiler=engine, threads=2, engine_options={"streams": 2}, scenarios=("offline", "server"), **_LOADGEN)
    assert ran.finished.state == "completed", ran.finished.message
    assert ran.details(InferStep.COMPILE)["concurrency"] == 2
    assert all(window.computed_ms is not None for window in ran.windows())
    offline, server = ran.of(Event.SCENARIO)
    for result in (offline, server):
        assert result.accuracy_answers.num_items == 100
        assert result.accuracy_answers.worst_error < 1e-4
    assert offline.figure > 0


def test_an_exception_of_one_call_ends_the_run_with_its_reason(take: Any, acme: Any) -> None:
    fails = "if self.started > 14: raise RuntimeError('the device fell off the bus')"
    ran = take(acme(_TWO.format(fails), engine_timeout_s=60))
    assert (ran.finished.state, ran.finished.failed_step) == ("failed", InferStep.INFER)
    assert "acme_rt" in ran.finished.message
    assert "fell off the bus" in ran.finished.message


def test_what_the_engine_is_optimized_for_follows_from_the_scenarios() -> None:
    base = {"batch_size": 1, "compiler": "openvino"}
    assert InferSettings(**base).optimized_for == "throughput"
    assert InferSettings(**base, scenarios=("offline",)).optimized_for == "throughput"
    assert InferSettings(**base, scenarios=("offline", "single_stream")).optimized_for == "latency"
    assert InferSettings(**base, scenarios=("single_stream",), optimize_for="throughput").optimized_for == "throughput"
