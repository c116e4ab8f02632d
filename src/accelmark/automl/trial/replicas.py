"""A trial on several devices of one host: one process a device, gradients averaged, images counted together."""

from __future__ import annotations

from typing import Final

import torch

from accelmark.automl.data import Dataset
from accelmark.automl.trial.executor import TorchExecutor, pick_device
from accelmark.automl.trial.loop import Replica
from accelmark.automl.trial.order import TrialExecutor

__all__ = ["make_executor"]

_ONE: Final = 1


def make_executor(dataset: Dataset, devices: int) -> TrialExecutor:
    """Return what trains trials on this worker's devices."""
    if devices == _ONE:
        return TorchExecutor(dataset, Replica(pick_device()))
    raise RuntimeError(f"{torch.accelerator.device_count()} devices here, {devices} asked for")
