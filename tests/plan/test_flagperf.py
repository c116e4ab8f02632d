"""FlagPerf's files come over as data; the fixtures have the form of those in its repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.plan.flagperf import convert
from accelmark.spec.errors import SpecError

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


def test_every_setting_of_a_cluster_has_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converted = convert(write(tmp_path, cluster_conf__py=CLUSTER, test_conf__py=TEST))
    assert converted.cluster == {
        "hosts": [{"address": "10.1.2.3", "service_ports": [2222]}, {"address": "10.1.2.4"}],
        "ssh_port": 2022,
        "master_port": 29502,
        "vendor": "nvidia",
        "container": {
            "engine": "docker",
            "privileged": True,
            "options": ["--gpus", "all", "b", "--device", "/dev/x"],
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
            {"key": "bert:pytorch_1.8:A100:1:8:2", "data": "/raid/bert/train"},
            {"key": "resnet50:pytorch_1.8:A100:2:8:1", "data": "/raid/imagenet; touch x"},
        ],
    }


def test_nothing_is_executed_and_what_is_no_data_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = {problem.key: problem.what for problem in convert(write(tmp_path, test_conf__py=TEST)).left_over}
    assert not (tmp_path / "pwned").exists()
    assert "is computed, and nothing is executed" in left["FLAGPERF_LOG_PATH"]
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
    assert converted.run["cases"] == [{"key": "resnet50:pytorch_1.13", "data": "/raid/imagenet/val", "task": "infer"}]


@pytest.mark.parametrize(
    ("text", "what"),
    [("HOSTS = [", "is not Python"), ("SSH_PORT = 'no'", "SSH_PORT"), ("HOSTS = ['a', 'a']", "hosts stand twice")],
)
def test_bad_files_are_named(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        convert(write(tmp_path, cluster_conf__py=text))


@pytest.mark.parametrize(
    "text",
    [
        f"X = 1{'0' * 400} / 3",
        "X = 1e308 * 10",
        f"X = 1{'0' * 200} * 1{'0' * 200}",
        "X = " + "+".join(["1"] * 700),
        "X = Y" + "+1" * 700,
        "X = " + "+".join(["1"] * 5000),
        "X = " + "-" * 20000 + "1",
    ],
    ids=["quotient", "infinite", "product", "long sum", "long sum of a name", "longer sum", "signs"],
)
def test_a_number_that_python_gives_up_on_is_one_error_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test_conf.py"
    path.write_text(f"SSH_PORT = 22\nif SSH_PORT:\n    pass\n{text}\nMASTER_PORT = 29501\n")
    with pytest.raises(SpecError) as refused:
        convert([path])
    (problem,) = refused.value.problems
    assert (problem.where, problem.key) == (str(path), "line 4")


def test_a_file_of_bytes_and_a_deep_yaml_file_are_one_error_with_the_name(tmp_path: Path) -> None:
    (tmp_path / "bytes.py").write_bytes(b"\0X = 1")
    (tmp_path / "deep.yaml").write_text("HOSTS: " + "[" * 3000 + "]" * 3000)
    for name in ("bytes.py", "deep.yaml"):
        with pytest.raises(SpecError, match=name):
            convert([tmp_path / name])
