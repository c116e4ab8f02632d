"""Measure the bandwidth between ranks: all-reduce and point to point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from accelmark.probe.timing import time_collective
from accelmark.spec.records import Rate

CPU_SIZES_MIB: Final = (1, 16, 64, 256)
ACCELERATOR_SIZES_MIB: Final = (*CPU_SIZES_MIB, 1024, 4096)
"""Buffer sizes; fast interconnects need gigabytes to reach their bandwidth."""


def probe_collectives(device: torch.device, budget_s: float) -> dict[str, Rate]:
    """Return the bus bandwidth of all-reduce (algorithm bandwidth x 2(n-1)/n) and of rank 0 to the last rank.

    All ranks of the default group have to call this.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        single = Rate(value=None, unit="GB/s", reason="needs at least two ranks")
        return {"all_reduce": single, "point_to_point": single}
    sizes = CPU_SIZES_MIB if device.type == "cpu" else ACCELERATOR_SIZES_MIB
    num_ranks, rank, last = dist.get_world_size(), dist.get_rank(), dist.get_world_size() - 1

    def point_to_point(buffer: Tensor) -> None:
        if rank == 0:
            dist.send(buffer, last)
        elif rank == last:
            dist.recv(buffer, 0)

    operations: dict[str, tuple[Callable[[Tensor], object], float]] = {
        "all_reduce": (dist.all_reduce, 2 * (num_ranks - 1) / num_ranks),
        "point_to_point": (point_to_point, 1.0),
    }
    share_s = budget_s / len(operations) / len(sizes)
    best: dict[str, Rate] = {}
    for name, (operation, factor) in operations.items():
        rates = [_bandwidth(operation, factor, mib, device, share_s) for mib in sizes]
        best[name] = max(rates, key=lambda rate: rate.value or 0.0)
    return best


def _bandwidth(
    operation: Callable[[Tensor], object], factor: float, mib: int, device: torch.device, budget_s: float
) -> Rate:
    buffer = torch.zeros(mib * 2**18, device=device)
    timing = time_collective(lambda: operation(buffer), device, budget_s)
    value = factor * mib * 2**20 / timing.seconds / 1e9
    return Rate(value=value, unit="GB/s", size=f"{mib} MiB", repetitions=timing.repetitions)
