"""FlagPerf's settings of training and inference cases become a vendor's layers of a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.compat.flagperf.convert import convert
from accelmark.spec.layers import Layer, resolve_inference
from accelmark.spec.plugins.catalog import load_case
from tests.plan.test_flagperf import left_in, site


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_steps = -5", "does not fit end.max_steps: input should be greater than 0, found -5"),
        ("warmup = 500", "does not fit schedule.warmup_ratio"),
        ("seed = 1.5", "does not fit seed"),
        ("lr = '0.1'", "is not a number: '0.1'"),
        ("fp16 = 'O2'", "is neither True nor False: 'O2'"),
        ("amp = False", "False does not say which precision it is instead"),
        ("eval_steps = None", "is None: the case's own value stays"),
    ],
)
def test_a_setting_that_its_reader_refuses_is_listed(tmp_path: Path, text: str, what: str) -> None:
    converted = site(tmp_path, f"{text}\ntrain_batch_size = 3\n", "config_A100x1x8.py")
    assert converted.configs == {"config_A100x1x8.yaml": {"batch_size": 3}}
    assert what in left_in(converted)[text.split()[0]]


CONFIGURATIONS = """
batch_size: 32
flops: 2*512*0.33e9
fp16: false
compiler: tensorrt
num_workers: 3
repeat: 7
no_validation: false
exist_onnx_path: null
exist_compiler_path: null
"""
KUNLUNXIN = """
fp16: true
compiler: xtcl
trt_tmp_path: tmp/model.trt
has_dynamic_axis: false
resnet50_fuse: true
"""


def inference_files(tmp_path: Path, case: str) -> list[Path]:
    folder = tmp_path / case
    (folder / "vendor_config").mkdir(parents=True)
    texts = {
        "configurations.yaml": CONFIGURATIONS,
        "parameters.yaml": "seq_length: 512\nmask_ratio: 0.1\n",
        "vendor_config/kunlunxin_configurations.yaml": KUNLUNXIN,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_inference_settings_become_a_vendors_layer_of_the_case(tmp_path: Path) -> None:
    converted = convert(inference_files(tmp_path, "bertLarge"))
    layer = converted.configs["infer.yaml"]
    side = load_case("bert_large").infer
    assert side is not None
    resolved = resolve_inference(side, "case.yaml", vendor=[Layer.of("infer.yaml", layer)])  # as a vendor's file
    settings = resolved.settings
    assert (settings.batch_size, settings.compiler, settings.num_workers, settings.repeat) == (32, "xtcl", 3, 7)
    assert settings.precision == "fp16"
    assert settings.engine_options == {"resnet50_fuse": True}
    left = {item.key: item.what for item in converted.left_over}
    assert set(left) == {"flops", "mask_ratio", "trt_tmp_path", "has_dynamic_axis"}
    assert "the case states the FLOPs" in left["flops"]
    assert "parameters are the case's" in left["mask_ratio"]
