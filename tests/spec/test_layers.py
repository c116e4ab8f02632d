from __future__ import annotations

from typing import Any

import pytest

from accelmark.spec.errors import SpecError
from accelmark.spec.layers import Layer, Resolved, may_change, resolve, resolve_inference
from accelmark.spec.model import parse
from accelmark.spec.plugins.case import MUTABLE_GROUPS, TrainCaseSpec
from accelmark.spec.settings.inference import InferCaseSpec, InferSettings, InferStep, why_skipped
from accelmark.spec.settings.training import TrainSettings

BASE = Layer.of(
    "case.yaml", {"batch_size": 8, "end": {"max_steps": 10}, "optimizer": {"lr": 0.1}, "model": {"width": 4, "p": 0.5}}
)


def test_the_strongest_layer_wins_and_every_value_remembers_where_it_came_from() -> None:
    resolved = resolve(
        TrainSettings,
        BASE,
        [Layer("vendor", {"batch_size": 16}), Layer("command line", {"batch_size": 32})],
        mutable=["batch_size"],
        is_open=False,
    )
    assert resolved.settings.batch_size == 32
    provenance = resolved.provenance["batch_size"]
    assert (provenance.value, provenance.layer) == (32, "command line")
    assert provenance.replaced == (("case.yaml", 8), ("vendor", 16))
    assert resolved.provenance["optimizer.momentum"].layer == "default"


def test_changing_what_the_case_fixes_is_an_error_that_names_the_layer_or_marks_an_open_run() -> None:
    layers = [Layer("vendors/acme/config.yaml", {"optimizer.lr": 0.2})]
    with pytest.raises(SpecError, match=r"vendors/acme/config.yaml: optimizer.lr: is not mutable"):
        resolve(TrainSettings, BASE, layers, mutable=["batch_size"], is_open=False)
    resolved = resolve(TrainSettings, BASE, layers, mutable=[], is_open=True)
    assert resolved.settings.optimizer.lr == 0.2
    assert resolved.provenance["optimizer.lr"].forced


def test_all_problems_of_all_layers_are_reported_at_once_with_the_nearest_name() -> None:
    layers = [
        Layer("vendor", {"bach_size": 1, "model.width": "wide"}),
        Layer("command line", {"batch_size": -1, "precision": "fp12"}),
    ]
    with pytest.raises(SpecError) as caught:
        resolve(TrainSettings, BASE, layers, mutable=["batch_size", "precision", "model"], is_open=False)
    text = str(caught.value)
    assert "vendor: bach_size: unknown setting (did you mean 'batch_size'?)" in text
    assert "vendor: model.width: must be int" in text
    assert "command line: batch_size" in text
    assert "command line: precision" in text


def test_synthetic_data_is_allowed_everywhere_because_it_marks_the_run() -> None:
    assert may_change("loader.synthetic", [])
    assert may_change("loader.num_workers", ["loader"])
    assert not may_change("loaders", ["loader"])


def test_a_case_names_groups_of_mutable_settings_and_its_tokens_are_those_of_a_sequence() -> None:
    train = {"unit": "token", "settings": {"batch_size": 1}, "mutable": ["batch", "channels_last", "execution"]}
    case = parse(TrainCaseSpec, train, "case.yaml")
    assert case.mutable == (*MUTABLE_GROUPS["batch"], "channels_last", *MUTABLE_GROUPS["execution"])
    assert may_change("optimizer.fused", case.mutable)
    assert not may_change("optimizer.lr", case.mutable)
    assert case.units_per_sample_key == "seq_length"
    assert parse(TrainCaseSpec, {**train, "units_per_sample": 7}, "case.yaml").units_per_sample_key is None
    assert parse(TrainCaseSpec, {**train, "unit": "image"}, "case.yaml").units_per_sample_key is None
    with pytest.raises(SpecError, match=r"names 'exection', which is no setting .*'execution'"):
        parse(TrainCaseSpec, {**train, "mutable": ["exection"]}, "case.yaml")


_CONFIGURATIONS: dict[str, Any] = {
    "batch_size": 256, "flops": "4.12e9", "fp16": True, "compiler": "tensorrt", "num_workers": 8, "repeat": 5,
    "no_validation": False, "exist_onnx_path": None,
}  # fmt: skip
_CASE = InferCaseSpec.model_validate(
    {"unit": "image", "metric": "top1", "tolerance": 0.005, "tolerance_why": "test", "configurations": _CONFIGURATIONS,
     "parameters": {"image_size": 224}}
)  # fmt: skip


def _resolve(vendor: dict[str, Any] | None = None) -> Resolved[InferSettings]:
    layers = [] if vendor is None else [Layer.of("vendor.yaml", vendor)]
    return resolve_inference(_CASE, "case.yaml", vendor=layers)


def test_the_configurations_of_the_specification_are_read() -> None:
    settings = _resolve().settings
    assert (settings.batch_size, settings.flops, settings.precision) == (256, 4.12e9, "fp16")
    assert (settings.compiler, settings.num_workers, settings.repeat) == ("tensorrt", 8, 5)
    assert _resolve({"flops": "2*512*0.33e9"}).settings.flops == 2 * 512 * 0.33e9


@pytest.mark.parametrize(
    ("vendor", "what"),
    [
        ({"flops": "__import__('os').getpid()"}, "only numbers"),
        ({"image_size": 192}, "vendor.yaml: image_size: is a parameter"),
        ({"perf_dir": "x"}, "perf_dir: is a name that the framework sets itself"),
        ({"hosts": "x"}, "hosts: is a name that the framework sets itself"),
        ({"batch_size": 256}, "has no effect"),
        ({"fp16": True}, "has no effect"),
        ({"flops": "4.12*1e9"}, "has no effect"),
        ({"warmup_batches": 5}, "has no effect"),
        ({"exist_onnx_path": None}, "has no effect"),
    ],
)
def test_what_a_vendor_may_not_set_is_refused(vendor: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        _resolve(vendor)
    assert what in str(caught.value)


def test_a_new_key_of_a_vendor_is_a_warning_and_reaches_the_engine() -> None:
    resolved = _resolve({"tensorrt_tmp_path": "/tmp/trt"})
    assert resolved.settings.engine_options == {"tensorrt_tmp_path": "/tmp/trt"}
    assert [(note.severity, note.key) for note in resolved.notes] == [("warning", "tensorrt_tmp_path")]
    assert resolved.provenance["engine_options.tensorrt_tmp_path"].layer == "vendor.yaml"


def test_a_changed_value_is_noted_with_old_and_new() -> None:
    resolved = _resolve({"batch_size": 64})
    (note,) = resolved.notes
    assert (note.severity, note.what) == ("info", "changed from 256 to 64")
    assert resolved.provenance["batch_size"].replaced == (("case.yaml", 256),)


@pytest.mark.parametrize(
    ("compiler", "skipped"), [("tensorrt", []), (None, [InferStep.EXPORT, InferStep.COMPILE, InferStep.INFER])]
)
def test_without_a_compiler_the_run_goes_from_validation_to_the_summary(
    compiler: str | None, skipped: list[InferStep]
) -> None:
    settings = InferSettings(batch_size=1, compiler=compiler)
    assert [step for step in InferStep if why_skipped(step, settings)] == skipped
