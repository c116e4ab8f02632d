"""The device of a Paddle rank: its numeric mode, process group and errors."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import paddle
import paddle.distributed as dist
from paddle.base import core

from accelmark.frameworks.paddle.launch import MASTER
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import Precision

_KIND: Final = re.compile(r"\(\w+\) \S")
"""The kind of a Paddle error (``(InvalidArgument)``), and a message in the same line."""
_MEMORY_ERRORS: Final = ("ResourceExhausted", "Out of memory", "out of memory", "bad_alloc", "Cannot allocate memory")


def open_device(job: JobSpec, ranks: RankPlace) -> str:
    """Make this rank's device the current one, and return its name (``cpu``, ``gpu:0``).

    Raises:
        RequestError: this Paddle has no such device, or fewer of them than the host has ranks.
    """
    if job.device_type == "cpu":
        paddle.set_device("cpu")
        return "cpu"
    available: list[str] = paddle.device.get_available_device() + paddle.device.get_available_custom_device()
    mine = [name for name in available if name.partition(":")[0] == job.device_type]
    if not mine:
        raise RequestError(
            f"vendor {job.vendor!r} needs a {job.device_type!r} device, and Paddle {paddle.__version__} finds only "
            f"{', '.join(available)}; check the driver and that the installed Paddle is a build for it"
        )
    if ranks.local_rank >= len(mine):
        raise RequestError(f"local rank {ranks.local_rank} has no device: {len(mine)} {job.device_type} visible here")
    paddle.set_device(f"{job.device_type}:{ranks.local_rank}")
    return f"{job.device_type}:{ranks.local_rank}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of the device or of the host is exhausted."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _MEMORY_ERRORS)
    )


def summary(error: BaseException) -> str:
    """Return the line of an error that says what happened; Paddle's begin with a stack and the kind of error."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if _KIND.search(line)), first_line(error))


def set_precision(precision: Precision, device: str) -> Precision:
    """Choose the numeric mode of fp32 matrix work; return the precision computed in.

    fp32 switches off the tf32 that Paddle uses by default. Paddle has neither bf16 nor fp16 matrix products on the CPU,
    and computes fp32 there.
    """
    if device == "cpu":
        return "fp32"
    if device.startswith("gpu"):
        core.set_cublas_switch(precision == "tf32")
        core.set_cudnn_switch(precision == "tf32")
    return precision


def join_ranks(job: JobSpec, ranks: RankPlace) -> Any:
    """Open the process group if there are several ranks; returns a gloo group for control messages, or None.

    The variables are those that Paddle's own launcher sets. Those of other launchers would take precedence.
    """
    if ranks.world_size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    address = os.environ[MASTER]
    os.environ.update(
        PADDLE_TRAINER_ID=str(ranks.rank),
        PADDLE_TRAINERS_NUM=str(ranks.world_size),
        PADDLE_TRAINER_ENDPOINTS=address,
        PADDLE_CURRENT_ENDPOINT=address,
        PADDLE_DISTRI_BACKEND=job.collective_backend,
    )
    if job.device_type != "cpu":
        os.environ[f"FLAGS_selected_{job.device_type}s"] = str(ranks.local_rank)
    dist.init_parallel_env()
    return dist.new_group(backend="gloo")
