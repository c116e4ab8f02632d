"""FlagPerf's files come over as data; the fixtures have the form of those in its documents and its repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accelmark.cli.runs import plan_request, read_run_file
from accelmark.compat.flagperf.convert import Converted, convert

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
CONFIG = """
from config_common import *
vendor = "nvidia"
dist_backend = "nccl"
train_batch_size = 4 * 3
learning_rate = 3.5e-4
fp16 = True
seed = 9031
max_steps = 500
opt_something = 3
"""
HOST = """
VENDOR: nvidia
HOSTS: ["127.0.0.1"]
CASES: {"resnet50:pytorch_1.13": /raid/imagenet/val}
"""


def write(directory: Path, **files: str) -> list[Path]:
    paths = []
    for name, text in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(text)
        paths.append(path)
    return paths


def test_every_setting_of_a_cluster_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converted = convert(write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=TEST))
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


def test_a_vendor_with_another_name_here_is_converted(tmp_path: Path) -> None:
    assert site(tmp_path, 'VENDOR = "dcu"\n').cluster["vendor"] == "hygon"


def test_the_frameworks_on_top_of_pytorch_become_pytorch_or_the_trainer(tmp_path: Path) -> None:
    table = {"llama2_7b:deepspeed_0.10:A100:1:8:1": None, "llama3_1_8b:flagscale:A100:1:8:1": None}
    table |= {"llama3_1_8b:megatron_core060:A100:2:8:1": None, "bert:deepspeed:A100:1:8:1": None}
    table |= {"aquila2_7b:flagscale:A100:1:8:1": None}
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


def test_nothing_is_executed_and_non_data_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = {problem.key: problem.what for problem in convert(write(tmp_path, test_conf__py=TEST)).left_over}
    assert not (tmp_path / "pwned").exists()
    assert "is an expression" in left["FLAGPERF_LOG_PATH"]
    assert "is code, not a setting" in left.values()
    assert "hosts need no clone" in left["FLAGPERF_PATH"]


def test_a_scale_configuration_becomes_settings(tmp_path: Path) -> None:
    converted = convert(write(tmp_path, config_A100x1x8__py=CONFIG))
    assert converted.configs == {
        "config_A100x1x8.yaml": {
            "batch_size": 12,
            "optimizer": {"lr": 3.5e-4},
            "precision": "fp16",
            "seed": 9031,
            "end": {"max_steps": 500},
        }
    }
    left = {problem.key for problem in converted.left_over}
    assert left == {"", "line 2", "vendor", "dist_backend", "opt_something"}


def test_an_inference_host_file_is_read_and_runs_here(tmp_path: Path) -> None:
    converted = convert(write(tmp_path, host__yaml=HOST))
    assert converted.cluster == {"vendor": "nvidia", "hosts": [{"address": "127.0.0.1"}], "launcher": "local"}
    assert converted.run["cases"] == [{"key": "resnet50:pytorch", "data": "/raid", "task": "infer"}]
    (problem,) = converted.left_over
    assert "pytorch 1.13 is not installed here" in problem.what
    assert "data /raid/imagenet/val: becomes the directory that contains imagenet/" in problem.what


# The settings of the examples of FlagPerf's documents, without their comments.
DOCS_CLUSTER = """'''Cluster configs'''

# Hosts to run the benchmark. Each item is an IP address or a hostname.
HOSTS = ["10.1.2.3", "10.1.2.4", "10.1.2.5", "10.1.2.6"]
# ssh connection port
SSH_PORT = "22"
"""
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
FIXED = {"max_steps": ("None", "10000"), "max_samples_termination": ("14000000", "4500000"), "seed": ("1", "9031")}


@pytest.mark.parametrize("is_open", [False, True])
def test_the_training_examples_of_the_documents_run_as_they_are_written(tmp_path: Path, is_open: bool) -> None:
    files = write(tmp_path, cluster_conf__py=DOCS_CLUSTER, test_conf__py=DOCS_TEST)
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
            assert all(value in left[name] for value in values), left[name]
        assert "--open" in left["bert:pytorch:A100:1:8:1"]
    others = {"FLAGPERF_PATH", "ACCE_CONTAINER_OPT", "CASES", "target_mlm_accuracy"}
    others |= {"start_warmup_step", "cache_eval_data"}
    assert left.keys() == others | (set() if is_open else {*FIXED, "bert:pytorch:A100:1:8:1"})
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


def site(directory: Path, text: str, name: str = "test_conf.py") -> Converted:
    path = directory / name
    path.write_text(text)
    return convert([path])


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
    assert converted.cluster["vendor"] == "nvidia"
    assert converted.run["cases"] == [{"key": "resnet50:pytorch", "data": "/raid/dataset/ImageNet", "task": "infer"}]
    assert "is no YAML" in left_in(converted)["line 4"]
