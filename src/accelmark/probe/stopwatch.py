"""Timing a repeated operation on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, final

import torch

MIN_REPETITIONS: Final = 5
GROUPS: Final = 5
"""Timed groups; the median group counts, so that one disturbance does not."""


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one operation, and how many were run to find out."""

    seconds: float
    repetitions: int


def time_operation(operation: Callable[[], object], device: torch.device, budget_s: float) -> Timing:
    """Time ``operation`` within about ``budget_s`` seconds: a warm-up, then groups, the median of which counts."""
    operation()
    synchronize(device)
    began = time.perf_counter()
    operation()
    synchronize(device)
    once = max(time.perf_counter() - began, 1e-7)
    per_group = max(1, min(1000, int(budget_s / GROUPS / once)))
    groups = GROUPS if per_group > 1 else max(1, min(MIN_REPETITIONS, int(budget_s / once)))
    seconds = [_time_group(operation, device, per_group) for _ in range(groups)]
    return Timing(median(seconds) / per_group, per_group * groups)


def _time_group(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
