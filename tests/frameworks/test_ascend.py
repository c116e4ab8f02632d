"""MindSpore on Ascend. A MOCK: no such device is here, so MindSpore's calls for one are noted and go to the CPU.

It shows which calls the backend makes, in which order and with which values; it does not show that they work there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.spec.plugins.catalog import load_framework, load_vendor
from tests.frameworks.rank_jobs import (
    SMALL_LLAMA,
    losses,
    rank_command,
    rank_events,
    rank_job,
    run_job,
    values,
    write_plays,
)

MOCK = """
import json, os, runpy, sys, time
import mindspore as ms
from mindspore import communication
from mindspore.device_context.ascend import op_precision

real = {"set_device": ms.set_device, "init": communication.init}
VARIABLES = ("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "RANK_ID", "RANK_SIZE", "DEVICE_ID")

def note(call):
    with open(f"calls{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")

def noted(name, then=lambda *values: None):
    def call(*values):
        note([name, *values])
        return then(*values)
    return call

class Event:
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        self.at = time.monotonic()
    def synchronize(self):
        pass
    def elapsed_time(self, end):
        return (end.at - self.at) * 1000

ms.set_device = noted("set_device", lambda target, index: real["set_device"]("CPU", 0))
for name in ("precision_mode", "matmul_allow_hf32", "conv_allow_hf32"):
    setattr(op_precision, name, noted(name))
communication.init = noted(
    "init", lambda backend: (note([os.environ[name] for name in VARIABLES]), real["init"]("mccl"))
)
ms.hal.get_device_name = lambda: "Ascend910B3"
ms.runtime.Event, ms.runtime.max_memory_allocated = Event, lambda: 5 * 2**20
sys.argv = ["rank", sys.argv[1]]
runpy.run_module("accelmark.train.loop.rank", run_name="__main__")
"""
DEVICE = ["set_device", "precision_mode", "matmul_allow_hf32", "conv_allow_hf32", "init"]

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


def test_the_vendor_declares_mindspores_names_of_its_device() -> None:
    device = load_vendor("ascend").frameworks["mindspore"]
    assert (device.device_type, device.collective_backend) == ("Ascend", "hccl")
    assert not {"ascend", "Ascend"} & set(load_framework("mindspore").devices)


def test_ranks_open_their_own_ascend_device_with_hccl_and_no_hf32(tmp_path: Path) -> None:
    data = {"shakespeare": write_plays(tmp_path)}
    changed = {"device_type": "Ascend", "collective_backend": "hccl", "vendor": "ascend"}
    settings: dict[str, Any] = {**SMALL_LLAMA, "precision": "tf32"}
    job = rank_job("mindspore", tmp_path / "mock", "llama_mini", data, settings, **changed)
    command, variables = rank_command(job, 2, MOCK)
    done = subprocess.run(command, env=variables, cwd=job.parent, timeout=400, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        calls = [json.loads(line) for line in (job.parent / f"calls{rank}.jsonl").read_text().splitlines()]
        expected: list[list[object]] = [["Ascend", rank], ["must_keep_origin_dtype"], [False], [False], ["hccl"]]
        assert [call for call in calls if call[0] in DEVICE] == [
            [name, *given] for name, given in zip(DEVICE, expected, strict=True)
        ]
        assert calls[-1] == ["MS_WORKER", str(rank), "2", str(rank), "2", str(rank)]
    events = rank_events(job, 0)
    (started,), (finished,) = values(events, "INIT_END"), values(events, "FINISHED")
    assert (started["device_type"], started["device_name"], started["device_index"]) == ("Ascend", "Ascend910B3", 0)
    assert started["precision"] == "fp32", "not HF32, for which MindSpore has no name among the precisions"
    assert finished["peak_device_memory_mib"] == 5
    on_cpu = rank_job("mindspore", tmp_path / "cpu", "llama_mini", data, {**settings, "precision": "fp32"})
    run_job(on_cpu, num_ranks=2)
    for rank in range(2):
        np.testing.assert_array_equal(losses(rank_events(job, rank)), losses(rank_events(on_cpu, rank)))
