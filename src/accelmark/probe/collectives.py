"""Measure the bandwidth between ranks: all-reduce and point to point."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

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
    share_s = budget_s / 2 / len(sizes)
    reduced = [_all_reduce(mib, device, share_s) for mib in sizes]
    sent = [_point_to_point(mib, device, share_s) for mib in sizes]
    return {"all_reduce": max(reduced, key=_bandwidth), "point_to_point": max(sent, key=_bandwidth)}


def _all_reduce(mib: int, device: torch.device, budget_s: float) -> Rate:
    num_ranks = dist.get_world_size()
    buffer = torch.zeros(mib * 2**18, device=device)
    timing = time_collective(lambda: dist.all_reduce(buffer), device, budget_s)
    return _rate(mib, 2 * (num_ranks - 1) / num_ranks, timing.seconds, timing.repetitions)


def _point_to_point(mib: int, device: torch.device, budget_s: float) -> Rate:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    buffer = torch.zeros(mib * 2**18, device=device)

    def send() -> None:
        if rank == 0:
            dist.send(buffer, last)
        elif rank == last:
            dist.recv(buffer, 0)

    timing = time_collective(send, device, budget_s)
    return _rate(mib, 1.0, timing.seconds, timing.repetitions)


def _rate(mib: int, factor: float, seconds: float, repetitions: int) -> Rate:
    value = factor * mib * 2**20 / seconds / 1e9
    return Rate(value=value, unit="GB/s", size=f"{mib} MiB", repetitions=repetitions)


def _bandwidth(rate: Rate) -> float:
    return rate.value or 0.0
