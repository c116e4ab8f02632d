"""FlagPerf's files come over as data; the fixtures have the form of those in its repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.compat.flagperf.convert import Converted, convert

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


def test_keys_that_a_run_would_refuse_are_left_out_with_the_reason(tmp_path: Path) -> None:
    keys = (
        "glm:pytorch_1.8:A100:1:8:1", "glmm:pytorch:A100:1:8:1", "swin_transformer:pytorch_1.8:A100:1:8:1",
        "resnet50:tensorflow2:A100:1:8:1", "swin:paddle:A100:1:8:1", "minilm:pytorch:A100:1:8:1",
        "resnet_mini:pytorch:A100:3:8:1",
        "llama3_8B:pytorch:A100:1:8:1", "llama_mini:jax:A100:1:8:1", "bertLarge:pytorch_1.13", "bert:pytorch",
    )  # fmt: skip
    table = "".join(f'    "{key}": "/data",\n' for key in keys)
    test = f'VENDOR = "dcu"\nCASES = {{\n{table}}}\n'
    converted = convert(write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=test))
    assert [case["key"] for case in converted.run["cases"]] == [
        "swin:pytorch_1.8:A100:1:8:1", "resnet50:tensorflow:A100:1:8:1", "llama3_1_8b:pytorch:A100:1:8:1",
        "llama_mini:jax:A100:1:8:1",
        "bert_large:pytorch_1.13",
    ]  # fmt: skip
    assert converted.cluster["vendor"] == "hygon"
    left = "\n".join(str(problem) for problem in converted.left_over)
    for said in (
        "glm:pytorch_1.8:A100:1:8:1: no case carries it: its model is not in transformers",
        "glmm:pytorch:A100:1:8:1: AccelMark has no such case",
        "llama3_8B:pytorch:A100:1:8:1: becomes llama3_1_8b:pytorch:A100:1:8:1: MLPerf's target",
        "resnet50:tensorflow2:A100:1:8:1: becomes resnet50:tensorflow:A100:1:8:1: this is the framework's name",
        "the case has no framework 'paddle': write swin:pytorch",
        "minilm:pytorch:A100:1:8:1: the case has no training side",
        "requests 3 hosts, HOSTS lists 2",
        "bert:pytorch: the case has no inference side",
    ):
        assert said in left


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
        "bert:pytorch:A100:1:8:1",
    ]
    assert [case.get("settings") for case in converted.run["cases"]] == [
        {"parallelism": name} for name in ("deepspeed", "ddp", "ddp", "deepspeed")
    ]  # fmt: skip
    left = "\n".join(str(problem) for problem in converted.left_over)
    assert "becomes llama2_7b:pytorch:A100:1:8:1: parallelism is deepspeed; zero.stage is 3" in left
    assert "FlagScale trains with Megatron-LM" in left
    assert "aquila2_7b:flagscale:A100:1:8:1: the case has no framework 'megatron-lm': write aquila2_7b:pytorch" in left


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
    assert left == {"line 2", "vendor", "dist_backend", "opt_something"}


def test_an_inference_host_file_is_read_and_runs_here(tmp_path: Path) -> None:
    converted = convert(write(tmp_path, host__yaml=HOST))
    assert converted.cluster == {"vendor": "nvidia", "hosts": [{"address": "127.0.0.1"}], "launcher": "local"}
    assert converted.run["cases"] == [{"key": "resnet50:pytorch_1.13", "data": "/raid", "task": "infer"}]
    (problem,) = converted.left_over
    assert "needs pytorch 1.13 on the hosts; leave the version out for the installed one" in problem.what
    assert "data /raid/imagenet/val: becomes the directory that contains imagenet/" in problem.what


def site(directory: Path, text: str, name: str = "test_conf.py") -> Converted:
    path = directory / name
    path.write_text(text)
    return convert([path])


def left_in(converted: Converted) -> dict[str, str]:
    return {problem.key: problem.what for problem in converted.left_over}
