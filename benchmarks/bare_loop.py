"""A bare PyTorch loop with a job's model, batch, optimizer and precision: the baseline of the driver's overhead.

``python benchmarks/bare_loop.py JOB.json NUM_STEPS`` prints ``{"step_ms": ...}``, the mean over the last two thirds of
the steps. The loop uses synthetic data on one device, and does no logging, timing or checks.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import torch

from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.train.case import case_class

_DTYPES: Final = {"bf16": torch.bfloat16}


def step_ms(job: JobSpec, num_steps: int) -> float:
    """Return the mean wall time of a step in milliseconds, without the first third of the steps."""
    assert isinstance(job.work, TrainJob)
    settings = job.work.settings
    device = torch.device(job.device_type)
    torch.manual_seed(settings.seed)
    torch.backends.cudnn.benchmark = device.type != "cpu"
    make = case_class(job.case, "pytorch", TrainCase)  # type: ignore[type-abstract]
    case = make(settings, job.data_dirs, Place(0, 1, 1, device, 1))
    model = case.build_model().to(device)
    batch = {name: tensor.to(device) for name, tensor in case.synthetic_batch(settings.batch_size).items()}
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        image = {name for name, tensor in batch.items() if tensor.ndim == 4}
        batch |= {name: batch[name].contiguous(memory_format=torch.channels_last) for name in image}
    optimizer = case.build_optimizer(model)
    schedule = case.build_schedule(optimizer, num_steps, num_steps)
    dtype = _DTYPES.get(settings.precision)
    clip = settings.gradient_clip_norm
    num_warm = num_steps // 3
    start = 0.0
    for step in range(num_steps):
        if step == num_warm:
            start = _now(device)
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss = case.loss(model, batch)
        torch.autograd.backward(loss)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    return (_now(device) - start) / (num_steps - num_warm) * 1000


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic()


if __name__ == "__main__":
    print(
        json.dumps({"step_ms": step_ms(JobSpec.model_validate_json(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))})
    )
