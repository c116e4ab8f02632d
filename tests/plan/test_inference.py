from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import SpecError
from accelmark.spec.job import InferJob
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import engine_specs
from accelmark.spec.runfile import RunSpec

_INFER = """
infer:
  unit: image
  metric: top1
  tolerance: 0.01
  tolerance_why: made up for tests
  data: [pictures]
  optional_data: [more]
  weights: toy/model.safetensors
  configurations: {batch_size: 4, compiler: eager, flops: 2*3}
  parameters: {side: 8}
"""
_DATA = """
data:
  - {name: pictures, title: P, licence: none, tree: [{path: val}]}
  - {name: more, title: M, licence: none, tree: [{path: val}]}
"""


@pytest.fixture
def toy(plugins: Path) -> Path:
    """The toy case with an inference side."""
    folder = plugins / "cases" / "toy"
    (folder / "case.yaml").write_text((folder / "case.yaml").read_text() + _DATA + _INFER)
    (folder / "infer_pytorch.py").write_text("")
    return plugins


def _data(case: CaseSpec, named: Path | None) -> Mapping[str, Path]:
    return {name: Path("/data") / name for name in case.data_names}


@pytest.mark.parametrize(
    ("case", "lower"), [("resnet_mini", "bf16"), ("minilm", "bf16"), ("efficientnet_lite0", "fp32")]
)
def test_the_default_engine_and_precision_of_a_mini_case_follow_from_the_cpu(case: str, lower: str) -> None:
    def settings(*capabilities: str) -> tuple[str | None, str]:
        found = Detected("cpu", "CPU", None, None, capabilities=dict.fromkeys(capabilities, "/proc/cpuinfo"))
        plan = build_plan(
            RunSpec.model_validate({"vendor": "cpu", "cases": [{"task": "infer", "key": case}]}),
            cluster=ClusterSpec(),
            detected=found,
            data_dirs=_data,
            created_at="2026-01-01T00:00:00Z",
            where="run.yaml",
        )
        work = plan.jobs[0].job.work
        assert isinstance(work, InferJob)
        return work.settings.compiler, work.settings.precision

    assert settings() == ("onnxruntime", "fp32")
    assert settings("avx2") == ("openvino", "fp32")
    assert settings("avx2", "avx512_bf16") == ("openvino", lower)
    assert settings("avx2", "avx512_bf16", "amx_bf16", "amx_int8") == ("openvino", lower)


@pytest.mark.parametrize(
    ("device_type", "options", "package"),
    [("cuda", {}, "onnxruntime-gpu"), ("cpu", {}, "onnxruntime"), ("cuda", {"providers": "CPU"}, "onnxruntime")],
)
def test_an_engine_needs_the_build_for_the_device(device_type: str, options: dict[str, object], package: str) -> None:
    needs = engine_specs()["onnxruntime"].requires_on(device_type, options)
    assert [one.partition(">=")[0] for one in needs if one.startswith("onnxruntime")] == [package]


def test_a_run_that_chooses_another_engine_gets_no_precision_in_which_that_one_does_not_compute() -> None:
    found = Detected("cpu", "CPU", None, None, capabilities=dict.fromkeys(("avx2", "avx512_bf16"), "/proc/cpuinfo"))

    def planned(compiler: str, **more: str) -> Plan:
        case = {"task": "infer", "key": "resnet_mini", "settings": {"compiler": compiler, **more}}
        return build_plan(
            RunSpec.model_validate({"vendor": "cpu", "cases": [case]}),
            cluster=ClusterSpec(),
            detected=found,
            data_dirs=_data,
            created_at="2026-01-01T00:00:00Z",
            where="run.yaml",
        )

    (job,) = planned("onnxruntime").jobs
    assert isinstance(job.job.work, InferJob)
    assert job.job.work.settings.precision == "fp32"
    assert "onnxruntime does not compute in bf16" in [file.reason for file in job.layer_files if not file.applied]
    (other,) = planned("inductor").jobs
    assert isinstance(other.job.work, InferJob)
    assert other.job.work.settings.precision == "bf16"
    with pytest.raises(SpecError, match=r"run.yaml: precision: onnxruntime does not compute in bf16 .*fp32 or fp16"):
        planned("onnxruntime", precision="bf16")


def _plan(
    *requests: dict[str, Any],
    command_line: dict[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    where: str = "run.yaml",
) -> Plan:
    return build_plan(
        RunSpec.model_validate({"vendor": "acme", "cases": [{"task": "infer"} | request for request in requests]}),
        cluster=ClusterSpec.model_validate(cluster or {}),
        detected=Detected("acme", "X1", None, 1),
        data_dirs=_data,
        created_at="2026-01-01T00:00:00Z",
        where=where,
        command_line=command_line or {},
    )


def test_an_inference_job_runs_one_process_of_the_infer_package(toy: Path) -> None:
    (planned,) = _plan({"key": "toy"}).jobs
    assert planned.nodes[0].command[-2:] == ("accelmark.infer", "job.json")
    assert isinstance(planned.job.work, InferJob)
    assert planned.job.work.settings.flops == 6
    assert planned.job.work.parameters == {"side": 8}
    assert planned.job.data_dirs == {"pictures": Path("/data/pictures")}


def test_an_engine_that_nobody_has_is_refused_before_anything_runs(toy: Path) -> None:
    with pytest.raises(SpecError, match=r"unknown engine 'openvin' \(did you mean 'openvino'\?\)"):
        _plan({"key": "toy", "settings": {"compiler": "openvin"}})
    with pytest.raises(SpecError, match=r"it is an engine of iluvatar: --vendor iluvatar"):
        _plan({"key": "toy", "settings": {"compiler": "ixrt"}})


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (
            {"compiler": "onnxruntime", "engine_options": {"graph_level": "foo", "streams": 0}},
            ["engine_options.graph_level", "engine_options.streams"],
        ),
        ({"compiler": "inductor", "exist_compiler_path": "a.pt2"}, ["exist_compiler_path"]),
        ({"compiler": "tensorrt"}, ["compiler"]),
        ({"compiler": "openvino", "exist_compiler_path": "/a.blob"}, ["exist_compiler_path"]),
        ({"compiler": "eager", "exist_onnx_path": "word", "no_validation": True}, ["no_validation"]),
        ({"compiler": "openvino", "exist_onnx_path": "a.onnx", "no_validation": True}, ["exist_onnx_path"]),
        ({"compiler": "openvino", "generate_batches": [1]}, ["compiler"]),
    ],
)
def test_what_the_engine_does_not_support_is_refused_before_anything_runs(
    toy: Path, settings: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        _plan({"key": "toy", "settings": settings})
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [("run.yaml", key) for key in keys]


def test_relative_files_of_a_run_file_and_of_the_command_line_are_found_from_the_ranks_directory(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/a.blob", "there/b.blob", "there/b.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "here")

    def files(given: str, settings: dict[str, Any], command_line: dict[str, Any]) -> list[str | None]:
        settings = {"compiler": "openvino", "no_validation": True, "exist_onnx_path": "word"} | settings
        (planned,) = _plan({"key": "toy", "settings": settings}, command_line=command_line, where=given).jobs
        assert isinstance(planned.job.work, InferJob)
        found = planned.job.work.settings
        assert planned.job.provenance["exist_compiler_path"].value == found.exist_compiler_path
        return [found.exist_compiler_path, found.exist_onnx_path]

    run_file = str(tmp_path / "there" / "run.yaml")
    in_file = {"exist_compiler_path": "b.blob", "exist_onnx_path": "b.onnx"}
    there = [str(tmp_path / "there" / name) for name in ("b.blob", "b.onnx")]
    assert files(run_file, in_file, {}) == there
    assert files("../there/run.yaml", in_file, {}) == [
        str(tmp_path / "here" / ".." / "there" / Path(name).name) for name in there
    ]
    here = str(tmp_path / "here" / "a.blob")
    assert files(run_file, in_file, {"exist_compiler_path": "a.blob"}) == [here, there[1]]
    assert files("command line", {"exist_compiler_path": "a.blob"}, {}) == [here, "word"]
    with pytest.raises(SpecError, match=r"there/a\.blob does not exist"):
        files(run_file, {"exist_compiler_path": "a.blob"}, {})
    with pytest.raises(SpecError, match=r"'a\.blob' is not an ONNX file"):
        _plan({"key": "toy", "settings": {"compiler": "openvino", "exist_onnx_path": "a.blob"}}, where=run_file)


def test_an_engine_of_the_vendors_folder_is_known(toy: Path) -> None:
    (toy / "vendors" / "acme" / "engines").mkdir()
    (toy / "vendors" / "acme" / "engines" / "acmert.py").touch()
    assert not any("engine" in told for told in _plan({"key": "toy", "settings": {"compiler": "acmert"}}).warnings)


def test_weights_and_optional_data_are_taken_where_the_named_directory_holds_them(toy: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    (named / "toy").mkdir(parents=True)
    (named / "more").mkdir()
    (named / "toy" / "model.safetensors").write_bytes(b"")
    plan = _plan({"key": "toy", "data": str(named)})
    assert plan.jobs[0].job.data_dirs["weights"] == named / "toy" / "model.safetensors"
    assert "more" in plan.jobs[0].job.data_dirs
    assert not plan.warnings


def test_a_case_whose_only_data_is_not_named_is_refused_unless_it_is_synthetic(toy: Path, tmp_path: Path) -> None:
    case = toy / "cases" / "toy" / "case.yaml"
    case.write_text(case.read_text(encoding="utf-8").replace("  data: [pictures]\n", ""), encoding="utf-8")
    with pytest.raises(SpecError, match=r"no data: no more/.*--data DIRECTORY.*--synthetic"):
        _plan({"key": "toy"})
    with pytest.raises(SpecError, match=f"no data: {tmp_path} has no more/"):
        _plan({"key": "toy", "data": str(tmp_path)})
    assert _plan({"key": "toy"}, command_line={"synthetic": True}).jobs


def test_synthetic_data_on_the_command_line_reaches_inference(toy: Path) -> None:
    (planned,) = _plan({"key": "toy"}, command_line={"loader.synthetic": True}).jobs
    assert isinstance(planned.job.work, InferJob)
    assert planned.job.work.settings.synthetic
    assert planned.job.data_dirs == {}


def test_a_vendors_file_follows_the_rules_of_overrides(toy: Path) -> None:
    folder = toy / "vendors" / "acme" / "cases" / "toy-pytorch"
    folder.mkdir(parents=True)
    (folder / "infer.yaml").write_text("batch_size: 4\nside: 9\nacme_cache: /tmp/x\n")
    with pytest.raises(SpecError) as caught:
        _plan({"key": "toy"})
    assert "batch_size: has no effect" in str(caught.value)
    assert "side: is a parameter" in str(caught.value)
    (folder / "infer.yaml").write_text("batch_size: 16\nacme_cache: /tmp/x\n")
    plan = _plan({"key": "toy"})
    infer = plan.jobs[0].job.work
    assert isinstance(infer, InferJob)
    assert infer.settings.batch_size == 16
    assert infer.settings.engine_options == {"acme_cache": "/tmp/x"}
    assert any("acme_cache" in warning or "none of the configurations" in warning for warning in plan.warnings)
