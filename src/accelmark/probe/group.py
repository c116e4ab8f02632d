"""What ranks can do together: all-reduce and point to point."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from accelmark.probe.stopwatch import synchronize
from accelmark.spec.ceilings import Rate

SIZES_MIB: Final = (1, 16, 64, 256)
ACCELERATOR_SIZES_MIB: Final = (1, 16, 64, 256, 1024, 4096)
"""Links between accelerators reach their full rate with gigabytes only, which are what FSDP2 and DDP exchange."""


def probe_group(device: torch.device, budget_s: float) -> dict[str, Rate]:
    """Return the bus bandwidth of all-reduce (algorithm bandwidth x 2(n-1)/n) and the rate from rank 0 to the last.

    All ranks of the default group have to call this.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        alone = Rate(value=None, unit="GB/s", reason="one rank has nobody to talk to")
        return {"all_reduce": alone, "point_to_point": alone}
    ranks = dist.get_world_size()
    sizes = SIZES_MIB if device.type == "cpu" else _fitting(device)
    share = budget_s / 2 / len(sizes)
    reduced = [_all_reduce(mib, ranks, device, share) for mib in sizes]
    sent = [_point_to_point(mib, ranks, device, share) for mib in sizes]
    return {"all_reduce": _best(reduced), "point_to_point": _best(sent)}


def _fitting(device: torch.device) -> tuple[int, ...]:
    """Return the sizes of which every rank can hold two buffers: ranks have to agree on them."""
    free, _ = torch.get_device_module(device).mem_get_info(device)
    least = torch.tensor(float(free), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return tuple(mib for mib in ACCELERATOR_SIZES_MIB if mib <= SIZES_MIB[-1] or 2 * mib * 2**20 < float(least))


def _all_reduce(mib: int, ranks: int, device: torch.device, budget_s: float) -> Rate:
    buffer = torch.zeros(mib * 2**18, device=device)
    seconds, repetitions = _time_together(lambda: dist.all_reduce(buffer), device, budget_s)
    return _rate(mib, 2 * (ranks - 1) / ranks, seconds, repetitions)


def _point_to_point(mib: int, ranks: int, device: torch.device, budget_s: float) -> Rate:
    buffer = torch.zeros(mib * 2**18, device=device)
    rank = dist.get_rank()

    def send() -> None:
        if rank == 0:
            dist.send(buffer, ranks - 1)
        elif rank == ranks - 1:
            dist.recv(buffer, 0)

    seconds, repetitions = _time_together(send, device, budget_s)
    return _rate(mib, 1.0, seconds, repetitions)


def _time_together(operation: Callable[[], object], device: torch.device, budget_s: float) -> tuple[float, int]:
    """Time the same number of repetitions on all ranks; the slowest rank counts."""
    operation()
    once = _slowest(_timed(operation, device, 1), device)
    repetitions = max(3, min(500, int(budget_s / max(once, 1e-6))))
    return _slowest(_timed(operation, device, repetitions), device) / repetitions, repetitions


def _timed(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    synchronize(device)
    return time.perf_counter() - began


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float32, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _rate(mib: int, factor: float, seconds: float, repetitions: int) -> Rate:
    value = factor * mib * 2**20 / seconds / 1e9
    return Rate(value=value, unit="GB/s", size=f"{mib} MiB", repetitions=repetitions)


def _best(rates: list[Rate]) -> Rate:
    return max(rates, key=lambda rate: rate.value or 0.0)
