"""Measure devices: matrix products per precision, memory bandwidth, copies from and to the host, and collectives.

Sizes and bandwidths of collectives are those of nccl-tests (its PERFORMANCE.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from accelmark.frameworks.pytorch.training.platform import all_gather, reduce_scatter, synchronize
from accelmark.spec.errors import first_line
from accelmark.spec.log.records import Collective, CollectiveTiming, Rate

SIZES: Final = (512, 1024, 2048, 4096, 8192, 16384)
"""Sizes of the square matrices; limited by time and memory."""
PRECISIONS: Final = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
_FLOATS: Final = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32,
                  "bf16": torch.bfloat16, "fp16": torch.float16}  # fmt: skip
_GIB: Final = 2**30
MIN_REPETITIONS: Final = 5
GROUPS: Final = 5
"""Number of timed groups of repetitions; the median group is used to exclude disturbances."""
MIN_TOGETHER: Final = 3
_MAX_TOGETHER: Final = 500


def probe_products(device: torch.device, budget_s: float) -> dict[str, Rate]:
    """Return the rate of matrix products in each precision."""
    return {name: probe_matmul(name, device, budget_s / len(PRECISIONS)) for name in PRECISIONS}


def probe_matmul(precision: str, device: torch.device, budget_s: float) -> Rate:
    """Return the best rate over the sizes: 2 n^3 operations, random operands (zeros draw less power)."""
    unit = "TOP/s" if precision == "int8" else "TFLOP/s"
    best = Rate(value=None, unit=unit, reason="no size could be timed")
    try:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        for side in SIZES:
            timing = time_operation(_product(precision, side, device), device, budget_s / len(SIZES))
            rate = 2 * side**3 / timing.seconds / 1e12
            if best.value is None or rate > best.value:
                size = f"{side} x {side} x {side}"
                best = Rate(value=rate, unit=unit, size=size, repetitions=timing.repetitions)
            if timing.seconds * 8 > budget_s:
                break
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if best.value is None:
            return Rate(value=None, unit=unit, reason=first_line(error))
    return best


def _product(precision: str, side: int, device: torch.device) -> Callable[[], object]:
    if precision == "tf32" and device.type == "cpu":
        raise ValueError("CPUs do not support tf32")
    if precision == "int8":
        left = torch.randint(-127, 127, (side, side), dtype=torch.int8, device=device)
        right = torch.randint(-127, 127, (side, side), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(left, right)
    if precision == "fp8" and device.type == "cpu":
        raise ValueError("CPUs do not support fp8 matrix products")
    if precision == "fp8":
        scale, out_dtype = torch.ones((), device=device), torch.bfloat16
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        b = b.t()
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=out_dtype, use_fast_accum=True)
    dtype = _FLOATS[precision]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def probe_memory(device: torch.device, budget_s: float) -> dict[str, Rate]:
    """Return the bandwidth of a copy (2 bytes moved per byte) and of ``a = b + s c`` (3), counted as STREAM does."""
    # much larger than caches and much smaller than memory
    size = _GIB // 4 if device.type == "cpu" else 2 * _GIB
    try:
        source, target, third = (torch.rand(size // 4, device=device) for _ in range(3))
    except RuntimeError as error:
        return _not_measured(("copy", "triad"), first_line(error))
    moves: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(source), 2),
        "triad": (lambda: torch.add(source, third, alpha=3.0, out=target), 3),
    }
    return {name: _bandwidth(move, n * size, size, device, budget_s / 2) for name, (move, n) in moves.items()}


def probe_copies(device: torch.device, budget_s: float) -> dict[str, Rate]:
    """Return the bandwidth between pinned host memory and the device; null on a CPU."""
    names = ("host_to_device", "device_to_host")
    if device.type == "cpu":
        return _not_measured(names, "the device is the CPU, which needs no copies")
    size = _GIB // 4
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        on_host = torch.empty(size, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        return _not_measured(names, first_line(error))
    moves = {
        "host_to_device": lambda: on_device.copy_(on_host, non_blocking=True),
        "device_to_host": lambda: on_host.copy_(on_device, non_blocking=True),
    }
    return {name: _bandwidth(move, size, size, device, budget_s / 2) for name, move in moves.items()}


def _not_measured(names: Iterable[str], reason: str) -> dict[str, Rate]:
    return {name: Rate(value=None, unit="GB/s", reason=reason) for name in names}


def _bandwidth(operation: Callable[[], object], moved: int, size: int, device: torch.device, budget_s: float) -> Rate:
    timing = time_operation(operation, device, budget_s)
    rate = moved / timing.seconds / 1e9
    return Rate(value=rate, unit="GB/s", size=f"{size // 2**20} MiB", repetitions=timing.repetitions)


class Timing(NamedTuple):
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
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    synchronize(device)
    return time.perf_counter() - began


_KIB: Final = 2**10
CPU_SIZES: Final = tuple(kib * _KIB for kib in (1, 16, 256, 1024, 16 * 1024, 64 * 1024, 256 * 1024))
ACCELERATOR_SIZES: Final = (*CPU_SIZES, 1024 * 1024 * _KIB, 4096 * 1024 * _KIB)
"""Bytes; fast interconnects need gigabytes to reach their bandwidth."""
_MAX_OVER: Final = 4.0
"""No larger size follows a size that took this much longer than its share of the time."""


def sweep_collectives(device: torch.device, budget_s: float) -> tuple[CollectiveTiming, ...]:
    """Return the time of each collective at each size; empty for a single rank. All ranks must call this."""
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
        return lambda: all_gather(whole, part)
    if name == "reduce_scatter":
        return lambda: reduce_scatter(part, whole)
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
