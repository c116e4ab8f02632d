"""The device, its numeric mode and the process group of a PyTorch rank."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.errors import RequestError, RunError, first_line
from accelmark.spec.job import JobSpec, LastCollective, LastCollectives
from accelmark.spec.plugins.framework import RankPlace, collectives_address
from accelmark.spec.settings.training import Precision
from accelmark.train.loop.contract import DeviceClock, LossReader

_FP32_SWITCHES: Final = (
    "fp32_precision", "mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
)  # fmt: skip
"""Switches of ``torch.backends`` for how fp32 work is computed."""
_MODES_OF: Final = {"fp32": ("none", "ieee"), "tf32": ("none", "ieee", "tf32")}
"""Declared precision -> values of those switches that keep it."""
MEETING_LIMIT: Final = timedelta(seconds=300)
"""How long ranks wait until all have come; later waits for the store have PyTorch's own limit."""
all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Under the names that they have from PyTorch 2.13 on."""


def synchronize(device: torch.device) -> None:
    """Wait for a device, unless it is the CPU."""
    if device.type != "cpu":  # before PyTorch 2.6, modules of devices have the function
        functions: Any = getattr(torch, "accelerator", None) or torch.get_device_module(device)
        functions.synchronize(device)


def open_device(job: JobSpec, ranks: RankPlace) -> torch.device:
    """Return this rank's device and make it the current one. Raises RequestError: there is none for this rank."""
    if job.framework_module is not None:
        importlib.import_module(job.framework_module)
    if job.device_type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, job.device_type, None)
    if module is None or not module.is_available():
        raise RequestError(
            f"vendor {job.vendor!r} needs a {job.device_type!r} device, and PyTorch {torch.__version__} finds none; "
            "check the driver and that the installed PyTorch is the vendor's build"
        )
    count = module.device_count()
    if ranks.local_rank >= count:
        raise RequestError(f"local rank {ranks.local_rank} has no device: {count} {job.device_type} visible here")
    device = torch.device(job.device_type, ranks.local_rank)
    module.set_device(device)
    return device


def call(device: torch.device, name: str, *args: Any) -> Any:
    """Call a function of the device's module; None for the CPU, and where the module has no such function."""
    function = None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(*args)


def device_name(device: torch.device) -> str | None:
    """Return the framework's name of the device; None for the CPU."""
    name = call(device, "get_device_name", device)
    return None if name is None else str(name)


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the largest allocation so far; None for the CPU and where the framework does not count."""
    num_bytes = call(device, "max_memory_allocated", device)
    return None if num_bytes is None else float(num_bytes) / 2**20


def forget_peak_memory(device: torch.device) -> None:
    """Reset the largest allocation, in a process that ran another job before."""
    call(device, "reset_peak_memory_stats", device)


def release_memory(device: torch.device) -> None:
    """Return the memory of an accelerator that no tensor uses, which other processes need; PyTorch would keep it."""
    if device.type != "cpu":
        gc.collect()  # modules of a model refer to each other
        call(device, "empty_cache")


def lock_pages(device: torch.device, memory: torch.Tensor) -> None:
    """Page-lock host memory that is mapped already, where the device's module has CUDA's runtime functions."""
    runtime = call(device, "cudart")
    if runtime is not None and (code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))):
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with error {code}")


def set_precision(precision: Precision, device: torch.device) -> Precision:
    """Choose the numeric mode of fp32 matrix work and how algorithms are chosen; return the precision computed in."""
    # The older names of these switches: they may not be mixed with the newer ones, and other libraries read them.
    reduced = precision == "tf32" and device.type != "cpu"
    torch.set_float32_matmul_precision("high" if reduced else "highest")
    torch.backends.cudnn.allow_tf32 = reduced
    # Shapes are constant over steps, so a search for the fastest convolution algorithms pays off.
    torch.backends.cudnn.benchmark = device.type != "cpu"
    return "fp32" if precision == "tf32" and device.type == "cpu" else precision


def reduced_modes(precision: Precision) -> tuple[str, ...]:
    """Return the switches of PyTorch that make it compute in a lower precision than the declared one."""
    allowed = _MODES_OF.get(precision)
    if allowed is None:
        return ()  # its products are computed in fewer bits anyway
    modes = []
    for name in _FP32_SWITCHES:
        holder: Any = torch.backends
        *path, last = name.split(".")
        for part in path:
            holder = getattr(holder, part, None)
        value = getattr(holder, last, None)
        if isinstance(value, str) and value not in allowed:
            modes.append(f"torch.backends.{name} = {value!r}")
    return tuple(modes)


def join_ranks(
    collectives: str | None, ranks: RankPlace, device: torch.device, *, needed: bool, store: Store | None = None
) -> dist.ProcessGroup | None:
    """Open the process group if there are several ranks or it is ``needed``: gloo, and the device's own backend.

    Ranks meet at ``store``, else where the launcher says. Returns a gloo group for control messages, which do not wait
    for the device. Raises RunError: the port of rank 0 is in use, or was not reached.
    """
    if ranks.world_size == 1 and not needed:
        return None
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{collectives}"
    if store is None and ranks.world_size > 1:
        host, _, port = os.environ[COORDINATOR].rpartition(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as under torchrun
        if ranks.local_world_size == ranks.world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=MEETING_LIMIT))
        except dist.DistNetworkError as error:
            if ranks.rank and "timed out" not in str(error):
                raise  # rank 0 has ended
            raise RunError(f"the ranks cannot meet at {os.environ[COORDINATOR]}: {first_line(error)}") from error
        store.set_timeout(default_pg_timeout)
    elif store is None:
        store = HashStore()
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size)
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def device_losses(clock: DeviceClock, *, pinned: bool = True, overwritten: bool = False) -> LossReader:
    """Return the reader of a device's losses: together into pinned memory, without waiting, when the window closes.

    ``overwritten``: each step writes its loss to the memory of the one before, as CUDA graphs do where the compiled
    model returns the loss; it is then copied on the device in its own step.
    """

    def fetch(losses: list[torch.Tensor]) -> Callable[[], list[float]]:
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        host = torch.empty(len(losses), dtype=torch.float32, pin_memory=pinned)
        host.copy_(stacked, non_blocking=True)
        copied = clock.mark()

        def read() -> list[float]:
            copied.synchronize()
            clock.release([copied])
            return [float(value) for value in host.tolist()]

        return read

    return LossReader(fetch, torch.clone) if overwritten else LossReader(fetch)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators in types that ``torch.load(weights_only=True)`` reads."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = (name, np.asarray(keys).tolist(), *rest)
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state of all generators from :func:`random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    of_numpy: Any = tuple(state["numpy"])
    np.random.set_state(of_numpy)
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def answer_collectives(node_dir: Path, rank: int) -> None:
    """Send the last collectives to the agent whenever it asks, also while the main thread waits for other ranks."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # PyTorch without a recorder for all backends
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(collectives_address(node_dir, rank))
        listener.listen()
    except OSError:  # no abstract addresses on this system: the cause of a stall is found without collectives
        listener.close()
        return

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                answer = LastCollectives(collectives=tuple(_last_collectives(json.loads(dump()))))
                connection.sendall(answer.model_dump_json().encode())

    threading.Thread(target=serve, name="flight-recorder", daemon=True).start()


def _last_collectives(trace: Mapping[str, Any]) -> Iterable[LastCollective]:
    """Yield the last collective of each process group in a trace of the recorder."""
    last: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries") or ():
        name = " ".join(entry["process_group"])
        if not entry["is_p2p"] and (name not in last or entry["collective_seq_id"] >= last[name]["collective_seq_id"]):
            last[name] = entry
    for name, entry in last.items():
        yield LastCollective(
            group=name,
            operation=entry["profiling_name"],
            number=entry["collective_seq_id"],
            state=entry["state"],
            sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        )
