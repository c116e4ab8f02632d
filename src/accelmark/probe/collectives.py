"""Measure collectives between ranks over a sweep of sizes, with the framework's own communicator.

Sizes and bandwidths are those of nccl-tests (its PERFORMANCE.md), so that results compare with its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from accelmark.probe.device import MIN_TOGETHER, time_collective
from accelmark.spec.log.records import Collective, CollectiveTiming, Rate

_KIB: Final = 2**10
CPU_SIZES: Final = tuple(kib * _KIB for kib in (1, 16, 256, 1024, 16 * 1024, 64 * 1024, 256 * 1024))
ACCELERATOR_SIZES: Final = (*CPU_SIZES, 1024 * 1024 * _KIB, 4096 * 1024 * _KIB)
"""Bytes; fast interconnects need gigabytes to reach their bandwidth."""
_MAX_OVER: Final = 4.0
"""No larger size follows a size that took this much longer than its share of the time."""
_all_gather: Final[Callable[[Tensor, Tensor], object]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Final[Callable[[Tensor, Tensor], object]] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
"""Under the names that they have from PyTorch 2.13 on."""


def sweep_collectives(device: torch.device, budget_s: float) -> tuple[CollectiveTiming, ...]:
    """Return the time of each collective at each size; empty for a single rank.

    All ranks of the default group must call this. Sizes of a collective end with a size that takes much longer than
    its share of ``budget_s``.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return ()
    sizes = CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES
    share_s = budget_s / len(get_args(Collective)) / len(sizes)
    return tuple(timing for name in get_args(Collective) for timing in _sweep(name, sizes, device, share_s))


def _sweep(name: Collective, sizes: Sequence[int], device: torch.device, share_s: float) -> Iterator[CollectiveTiming]:
    num_ranks, last_s = dist.get_world_size(), 0.0
    factors = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "point_to_point": 1.0}
    for size in sizes:
        if last_s * MIN_TOGETHER > _MAX_OVER * share_s:  # the same on all ranks: times are the slowest rank's
            return
        count = max(1, size // 4 // num_ranks) * num_ranks
        timing = time_collective(_operation(name, count, device), device, share_s)
        last_s = timing.seconds
        rate = 4 * count / timing.seconds / 1e9
        yield CollectiveTiming(
            operation=name,
            size_bytes=4 * count,
            time_us=timing.seconds * 1e6,
            algorithm_gb_s=rate,
            bus_gb_s=rate * factors.get(name, (num_ranks - 1) / num_ranks),
            repetitions=timing.repetitions,
        )


def _operation(name: Collective, count: int, device: torch.device) -> Callable[[], object]:
    """Return one collective over ``count`` fp32 elements, a multiple of the number of ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    whole: Tensor = torch.zeros(count, device=device)
    part: Tensor = torch.zeros(count // num_ranks, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: _all_gather(whole, part)
    if name == "reduce_scatter":
        return lambda: _reduce_scatter(part, whole)
    if name == "all_to_all":
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole)
    ends = {0: lambda: dist.send(whole, num_ranks - 1), num_ranks - 1: lambda: dist.recv(whole, 0)}
    return ends.get(rank, lambda: None)


def best_rates(sweep: Sequence[CollectiveTiming]) -> dict[str, Rate]:
    """Return the largest bus bandwidth of each collective over its sizes."""
    rates: dict[str, Rate] = {}
    for name in get_args(Collective):
        timings = [timing for timing in sweep if timing.operation == name]
        if not timings:
            rates[name] = Rate(value=None, unit="GB/s", reason="needs at least two ranks")
            continue
        best = max(timings, key=lambda timing: timing.bus_gb_s)
        size = f"{best.size_bytes / 2**20:.4g} MiB"
        rates[name] = Rate(value=best.bus_gb_s, unit="GB/s", size=size, repetitions=best.repetitions)
    return rates
