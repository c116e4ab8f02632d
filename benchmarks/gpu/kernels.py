"""Profile three steps of Llama 1.3B, compiled, in bf16: the 20 kernels that take most of the device's time.

Prints one line of JSON: ``kernels`` with name, share and calls, and ``device_share``, the device's busy share of the
wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bare import build
from benchmarks.gpu.decode import device_here
from benchmarks.gpu.training import LLAMA_1B, TINY_LLAMA

_SHOWN: Final = 20
_WARM: Final = 6


def measure(*, tiny: bool) -> dict[str, Any]:
    """Return what the docstring of this module says."""
    device = device_here()
    case = build("llama2_7b", {**(TINY_LLAMA if tiny else LLAMA_1B), "batch_size": 2 if tiny else 4}, device)
    model = case.build_model().to(device)
    batch = {name: tensor.to(device) for name, tensor in case.synthetic_batch(2 if tiny else 4).items()}
    optimizer = case.build_optimizer(model)
    network: Any = model if tiny else torch.compile(model)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = case.loss(network, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(1 if tiny else _WARM):
        step()
    activities = [ProfilerActivity.CPU] if device.type == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    began = time.monotonic()
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    wall_us = (time.monotonic() - began) * 1e6
    own = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    events = [(event.key, float(getattr(event, own)), event.count) for event in profiler.key_averages()]
    total = sum(spent for _, spent, _ in events)
    top = sorted(events, key=lambda event: -event[1])[:_SHOWN]
    kernels = [{"name": name, "share": spent / total, "calls": count} for name, spent, count in top]
    return {"device_share": total / wall_us, "kernels": kernels}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    print(json.dumps(measure(tiny=parser.parse_args().tiny)))
