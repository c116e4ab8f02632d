"""Time a repeated operation on one device, or on all ranks of the process group together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, final

import torch
import torch.distributed as dist

MIN_REPETITIONS: Final = 5
GROUPS: Final = 5
"""Number of timed groups of repetitions; the median group is used to exclude disturbances."""
MIN_TOGETHER: Final = 3
_MAX_TOGETHER: Final = 500


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Duration of one operation in s, and the number of repetitions that were timed."""

    seconds: float
    repetitions: int


def time_operation(operation: Callable[[], object], device: torch.device, budget_s: float) -> Timing:
    """Time ``operation`` within about ``budget_s`` seconds: warm-up, then the median of groups."""
    operation()
    once = max(_time_repetitions(operation, device, 1), 1e-7)
    per_group = max(1, min(1000, int(budget_s / GROUPS / once)))
    groups = GROUPS if per_group > 1 else max(1, min(MIN_REPETITIONS, int(budget_s / once)))
    seconds = [_time_repetitions(operation, device, per_group) for _ in range(groups)]
    return Timing(median(seconds) / per_group, per_group * groups)


def time_collective(operation: Callable[[], object], device: torch.device, budget_s: float) -> Timing:
    """Time the same number of repetitions on all ranks of the default group; return the slowest rank's time."""

    def slowest(repetitions: int) -> float:
        dist.barrier()
        seconds = torch.tensor(_time_repetitions(operation, device, repetitions), dtype=torch.float32, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    operation()
    repetitions = max(MIN_TOGETHER, min(_MAX_TOGETHER, int(budget_s / max(slowest(1), 1e-6))))
    return Timing(slowest(repetitions) / repetitions, repetitions)


def _time_repetitions(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
