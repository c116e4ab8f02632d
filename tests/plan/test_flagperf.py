"""FlagPerf's files come over as data; the fixtures have the form of those in its documents and its repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from accelmark.cli.checks import vendor_checks
from accelmark.cli.main import app
from accelmark.cli.runs import plan_request, read_run_file
from accelmark.compat.flagperf.convert import Converted, convert
from accelmark.spec.layers import Layer, resolve_inference
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, load_case, look_again

KEPT = {
    "swin_transformer:pytorch_1.8:A100:1:8:1": "swin:pytorch:A100:1:8:1",
    "resnet50:tensorflow2:A100:1:8:1": "resnet50:tensorflow:A100:1:8:1",
    "llama3_8B:pytorch:A100:1:8:1": "llama3_1_8b:pytorch:A100:1:8:1",
    "llama_mini:jax:A100:1:8:1": "llama_mini:jax:A100:1:8:1",
    "bertLarge:pytorch_1.13": "bert_large:pytorch",
}
REFUSED = {
    "longformer:pytorch_1.8:A100:1:8:1": "no case carries it: not written yet",
    "glmm:pytorch:A100:1:8:1": "glmm",
    "swin:paddle:A100:1:8:1": "no framework 'paddle'",
    "minilm:pytorch:A100:1:8:1": "does not support training",
    "resnet_mini:pytorch:A100:3:8:1": "requests 3 hosts",
    "bert:pytorch": "does not support inference",
    "gpt3_6.7B:mindspore:A100:1:8:1": "mindspore",
    "resnet50:mindspore:A100:1:8:1": "mindspore",
}

CLUSTER = """
'''Cluster configs'''
HOSTS = ["10.1.2.3", "10.1.2.4"]
SSH_PORT = "2022"
HOSTS_PORTS = ["2222"]
MASTER_PORT = "29502"
"""
TEST = """
import os
VENDOR = "nvidia"
FLAGPERF_PATH = "/home/FlagPerf/training"
FLAGPERF_LOG_PATH = os.path.join(FLAGPERF_PATH, "result")
FLAGPERF_LOG_LEVEL = 'debug'
ACCE_CONTAINER_OPT = " --gpus all --privileged -v /opt/a b --device /dev/x"
ACCE_VISIBLE_DEVICE_ENV_NAME = "CUDA_VISIBLE_DEVICES"
SHM_SIZE = "32" + "G"
PIP_SOURCE = "https://mirror.example/simple"
CLEAR_CACHES = True
CASES = {
    "bert:pytorch_1.8:A100:1:8:2": "/raid/bert/train",
    "resnet50:pytorch_1.8:A100:2:8:1": "/raid/imagenet; touch x",
}
for _ in range(3):
    os.system("touch pwned")
"""


def write(directory: Path, **files: str) -> list[Path]:
    paths = []
    for name, text in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(text)
        paths.append(path)
    return paths


def test_every_setting_of_a_cluster_file_is_used_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    converted = convert(write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=TEST))
    left = left_in(converted)
    assert not (tmp_path / "pwned").exists()
    assert "is an expression" in left["FLAGPERF_LOG_PATH"]
    assert "is code, not a setting" in left.values()
    assert "hosts need no clone" in left["FLAGPERF_PATH"]
    assert converted.cluster == {
        "hosts": [
            {"address": "10.1.2.3", "service_ports": [2222]},
            {"address": "10.1.2.4", "service_ports": [2222]},
        ],
        "ssh_port": 2022,
        "master_port": 29502,
        "vendor": "nvidia",
        "container": {
            "engine": "docker",
            "privileged": True,
            "options": ["--device", "/dev/x"],
            "mounts": ["/opt/a"],
            "shm_size": "32G",
            "pip_source": "https://mirror.example/simple",
        },
        "visible_devices_env": "CUDA_VISIBLE_DEVICES",
        "clear_caches": True,
        "launcher": "ssh",
    }
    assert converted.run == {
        "log_level": "debug",
        "cases": [
            {"key": "bert:pytorch:A100:1:8:2", "data": "/raid/bert/train"},
            {"key": "resnet50:pytorch:A100:2:8:1", "data": "/raid/imagenet; touch x"},
        ],
    }


def test_the_frameworks_on_top_of_pytorch_become_pytorch_or_the_trainer(tmp_path: Path) -> None:
    keys = ("llama2_7b:deepspeed_0.10", "llama3_1_8b:flagscale", "aquila2_7b:flagscale")
    table = {f"{key}:A100:1:8:1": None for key in keys} | {"llama3_1_8b:megatron_core060:A100:2:8:1": None}
    converted = convert(
        write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=f'VENDOR = "nvidia"\nCASES = {table}\n')
    )
    assert [case["key"] for case in converted.run["cases"]] == [
        "llama2_7b:pytorch:A100:1:8:1",
        "llama3_1_8b:megatron-lm:A100:1:8:1",
        "llama3_1_8b:megatron-lm:A100:2:8:1",
    ]
    assert [case.get("settings") for case in converted.run["cases"]] == [
        {"parallelism": name} for name in ("deepspeed", "ddp", "ddp")
    ]  # fmt: skip
    left = "\n".join(str(problem) for problem in converted.left_over)
    assert "becomes llama2_7b:pytorch:A100:1:8:1: parallelism is deepspeed; zero.stage is 3" in left
    assert "FlagScale trains with Megatron-LM" in left
    assert "aquila2_7b:flagscale:A100:1:8:1: a run would refuse aquila2_7b:megatron-lm:A100:1:8:1" in left


# The settings of the examples of FlagPerf's documents, without their comments.
DOCS_TEST = """'''Test Configs, including'''
# -*-coding:utf-8 -*-
VENDOR = "nvidia"
ACCE_CONTAINER_OPT = " --gpus all"
ACCE_VISIBLE_DEVICE_ENV_NAME = "CUDA_VISIBLE_DEVICES"
PIP_SOURCE = "https://mirror.example/pypi/simple"
FLAGPERF_PATH = "/home/FlagPerf/training"
FLAGPERF_LOG_PATH = FLAGPERF_PATH + "/result/"
FLAGPERF_LOG_LEVEL = 'debug'
SHM_SIZE = "32G"
CLEAR_CACHES = True

# Set the case dict you want to run here.
'''
# Users must use {
    "model:framework:hardwareID:nnodes:nproc:repeat": "dataset path"}
'''
CASES = {
    "bert:pytorch_1.8:A100:1:8:1": "/home/datasets_ckpt/bert/train/",
    "glm:pytorch_1.8:A100:1:8:1": "/home/datasets_ckpt/glm/train/"
}
"""
DOCS_CONFIG = """target_mlm_accuracy = 0.67
gradient_accumulation_steps = 1
max_steps = 10000
start_warmup_step = 0
warmup_proportion = 0
warmup_steps = 2000

learning_rate = 1e-4
weight_decay_rate = 0.01
opt_lamb_beta_1 = 0.9
opt_lamb_beta_2 = 0.999
train_batch_size = 12
eval_batch_size = train_batch_size
max_samples_termination = 4500000
cache_eval_data = False

seed = 9031
"""
FIXED = {"max_steps": ("not set", "10000"), "max_samples_termination": ("14000000", "4500000"), "seed": ("1", "9031")}


@pytest.mark.parametrize("is_open", [False, True])
def test_the_training_examples_of_the_documents_run_as_they_are_written(tmp_path: Path, is_open: bool) -> None:
    files = write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=DOCS_TEST)
    folder = tmp_path / "nvidia" / "bert-pytorch" / "config"
    folder.mkdir(parents=True)
    files = [*files, *write(folder, config_A100x1x8__py=DOCS_CONFIG)]
    converted = convert(files, is_open=is_open)
    case, glm = converted.run["cases"]
    assert glm == {"key": "glm:pytorch:A100:1:8:1", "data": "/home/datasets_ckpt/glm/train/"}
    assert (case["key"], case["data"]) == ("bert:pytorch:A100:1:8:1", "/home/datasets_ckpt/bert/train/")
    assert converted.run["runs"] == "/home/FlagPerf/training/result/"
    settings = {
        "gradient_accumulation_steps": 1, "schedule.warmup_ratio": 0, "schedule.warmup_steps": 2000,
        "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.01, "optimizer.beta1": 0.9, "optimizer.beta2": 0.999,
        "batch_size": 12, "eval_batch_size": 12,
    }  # fmt: skip
    fixed = {"end.max_steps": 10000, "end.max_samples": 4500000, "seed": 9031}
    assert case["settings"] == settings | (fixed if is_open else {})
    left = left_in(converted)
    if not is_open:
        for name, values in FIXED.items():
            assert all(value in left[name] for value in (*values, "--open")), left[name]
    others = {"FLAGPERF_PATH", "ACCE_CONTAINER_OPT", "CASES", "target_mlm_accuracy"}
    others |= {"start_warmup_step", "cache_eval_data"}
    assert left.keys() == others | (set() if is_open else {*FIXED})
    assert "mlm accuracy ≥ 0.72" in left["target_mlm_accuracy"]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(converted.cluster))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"cluster": "cluster.yaml"} | converted.run))
    file = tmp_path / "run.yaml"
    plan = plan_request(
        read_run_file(file), (), synthetic=False, where=str(file), base=tmp_path, allow_missing_data=True
    )
    assert read_run_file(file).runs == Path("/home/FlagPerf/training/result")
    origin = plan.jobs[0].job.provenance["batch_size"]
    assert (origin.value, origin.layer) == (12, str(file))


def test_the_inference_example_of_the_manual_is_read(tmp_path: Path) -> None:
    host = """FLAGPERF_PATH: "/home//FlagPerf/inference"
FLAGPERF_LOG_PATH: "result"
VENDOR: "nvidia"
FLAGPERF_LOG_LEVEL: "INFO"
LOG_CALL_INFORMATION: True
HOSTS: ["10.1.2.155"]
SSH_PORT: "22"
HOSTS_PORTS: ["2222"]
MASTER_PORT: "29501"
SHM_SIZE: "32G"
ACCE_CONTAINER_OPT: " --gpus all"
PIP_SOURCE: "https://mirror.example/pypi/simple"
CLEAR_CACHES: True
ACCE_VISIBLE_DEVICE_ENV_NAME: "CUDA_VISIBLE_DEVICES"
CASES:
"resnet50:pytorch_1.13": "/raid/dataset/ImageNet_1k_2012/val"
"""
    configuration = """batch_size: 256
flops: 4.12e9
fp16: true
compiler: tensorrt
num_workers: 8
log_freq: 30
repeat: 5
no_validation: false
exist_onnx_path: null
exist_compiler_path: null
"""
    converted = convert(write(tmp_path, host__yaml=host, configuration__yaml=configuration))
    assert (converted.run["log_level"], converted.run["runs"]) == ("info", "result")
    (case,) = converted.run["cases"]
    assert (case["key"], case["task"]) == ("resnet50:pytorch", "infer")
    assert case["settings"] == {"repeat": 5}, "the other values are the case's own"
    left = left_in(converted)
    assert left.keys() == {"FLAGPERF_PATH", "LOG_CALL_INFORMATION", "ACCE_CONTAINER_OPT", "CASES", "flops"}
    assert "no image of pytorch 1.13" in left["CASES"]
    assert "contains imagenet/" in left["CASES"]


def left_in(converted: Converted) -> dict[str, str]:
    return {problem.key: problem.what for problem in converted.left_over}


def test_keys_that_a_run_would_refuse_are_left_out_with_the_reason(tmp_path: Path) -> None:
    table = "".join(f'    "{key}": None,\n' for key in (*KEPT, *REFUSED))
    converted = convert(
        write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=f'VENDOR = "nvidia"\nCASES = {{\n{table}}}\n')
    )
    assert [case["key"] for case in converted.run["cases"]] == list(KEPT.values())
    left = "\n".join(str(problem) for problem in converted.left_over)
    for key, said in REFUSED.items():
        assert any(said in line for line in left.splitlines() if f"{key}: " in line), key
    assert "llama3_8B:pytorch:A100:1:8:1: becomes llama3_1_8b:pytorch:A100:1:8:1: MLPerf's target" in left


def test_the_inference_example_of_the_readme_is_read_with_a_line_that_is_no_yaml(tmp_path: Path) -> None:
    host = """
FLAGPERF_PATH: "/home/FlagPerf/inference" #FlagPerf inference
HOSTS: ["127.0.0.1"]
VENDOR = "nvidia"
CASES:
    "resnet50:pytorch_1.13": "/raid/dataset/ImageNet/imagenet/val"
"""
    converted = convert(write(tmp_path, host__yaml=host))
    assert converted.cluster == {"vendor": "nvidia", "hosts": [{"address": "127.0.0.1"}], "launcher": "local"}
    assert converted.run["cases"] == [{"key": "resnet50:pytorch", "data": "/raid/dataset/ImageNet", "task": "infer"}]
    left = left_in(converted)
    assert "is no YAML" in left["line 4"]
    assert "pytorch 1.13 is not installed here" in left["CASES"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("lr = '0.1'", "is '0.1', not a number: the case's own value is kept"),
        ("fp16 = 'O2'", "is 'O2', not True: the case's own precision is kept"),
    ],
)
def test_a_setting_that_its_reader_refuses_is_listed(tmp_path: Path, text: str, what: str) -> None:
    converted = convert(write(tmp_path, config_A100x1x8__py=f"{text}\ntrain_batch_size = 3\n"))
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


def test_inference_settings_become_a_vendors_layer_of_the_case(tmp_path: Path) -> None:
    folder = tmp_path / "bertLarge" / "vendor_config"
    folder.mkdir(parents=True)
    parameters = "seq_length: 512\nmask_ratio: 0.1\n"
    files = write(folder.parent, configurations__yaml=CONFIGURATIONS, parameters__yaml=parameters)
    converted = convert([*files, *write(folder, kunlunxin_configurations__yaml=KUNLUNXIN)])
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


TREE = {
    "README.md": "# Acme\n",
    "acme_monitor.py": "print('a monitor')\n",
    "docker_image/pytorch_1.13/Dockerfile": "FROM acme:1\n",
    "docker_image/pytorch_1.13/pytorch_1.13_install.sh": "#!/bin/bash\n",
    "bert-pytorch/README.md": "# BERT on Acme\n",
    "bert-pytorch/config/config_X1x1x8.py": "from config_common import *\ntrain_batch_size = 6\nseed = 5\n",
    "bert-pytorch/config/config_common.py": "vendor = 'acme'\nlearning_rate = 1e-4\n",
    "bert-pytorch/config/environment_variables.sh": "export ACME_FAST=1\n",
    "bert-pytorch/config/requirements.txt": "",
    "bert-pytorch/csrc/setup.py": "from setuptools import setup\nsetup()\n",
    "bert-pytorch/extern/converter.py": "def convert_model(model):\n    return model\n\n\ndef fused():\n    pass\n",
    "bert-pytorch/extern/.gitkeep": "",
    "longformer-pytorch/config/config_X1x1x8.py": "train_batch_size = 6\n",
}


def test_a_vendors_directory_becomes_a_folder_that_its_check_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, out = tmp_path / "training" / "acme", tmp_path / "vendors" / "acme"
    for name, text in TREE.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "bert-pytorch" / "csrc" / "lib.so").write_bytes(b"\xff\xfe\x00")
    done = CliRunner().invoke(app, ["import", "flagperf", str(tree), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    case = out / "cases" / "bert-pytorch"
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "README.md", "vendor.yaml", "acme_monitor.py", "images/pytorch_1.13/Dockerfile",
        "images/pytorch_1.13/pytorch_1.13_install.sh",
        *(f"cases/bert-pytorch/{name}" for name in ("README.md", "csrc/setup.py")),
        "cases/bert-pytorch/port/converter.py",
        *(f"cases/bert-pytorch/config/{name}" for name in ("config.yaml", "config_X1x1x8.yaml")),
        *(f"cases/bert-pytorch/config/{name}" for name in ("environment_variables.sh", "requirements.txt")),
    }  # fmt: skip
    assert yaml.safe_load((case / "config" / "config.yaml").read_text()) == {"optimizer": {"lr": 1e-4}}
    assert yaml.safe_load((case / "config" / "config_X1x1x8.yaml").read_text()) == {"batch_size": 6}
    listed = " ".join(done.output.split())
    for said in (
        "seed: seed: is not mutable: it is 1, not 5",
        "converter.py: port it by hand to methods of class Extern in extern/__init__.py: convert_model",
        "lib.so: is not UTF-8 text",
        "longformer-pytorch: no case carries it: not written yet",
        "vendor.yaml: add its chips",
    ):
        assert said in listed, said
    assert "from config_common" not in listed, "it is read, too"
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    look_again()
    checks = list(vendor_checks("acme", run=False))
    assert [check.what for check in checks if check.state == "missing"] == []
    assert any("cases/bert-pytorch/port is not read" in check.what for check in checks if check.state == "advice")
