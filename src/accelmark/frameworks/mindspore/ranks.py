"""The device of a MindSpore rank, and exchanges with the other ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final, final

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, init, release

from accelmark.frameworks.array_backend import processor_name
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.framework import RankPlace

_LEAVE_S: Final = 60.0


@final
class Ranks:
    """The device of this rank; several ranks are one communication group."""

    def __init__(self, job: JobSpec, threads: int, place: RankPlace) -> None:
        """Open the device with its threads, and join the other ranks.

        Raises:
            RequestError: MindSpore cannot open the device.
        """
        self.is_cpu = job.device_type == "cpu"
        self.size = place.world_size
        self._rank = place.rank
        self._scheduler: subprocess.Popen[bytes] | None = None
        ms.set_context(mode=ms.PYNATIVE_MODE)
        try:
            ms.set_device("CPU" if self.is_cpu else "Ascend", 0 if self.is_cpu else place.local_rank)
        except (RuntimeError, ValueError) as error:
            what = f"local rank {place.local_rank} has no {job.device_type}: {first_line(error)}"
            raise RequestError(f"{what}; check the driver and CANN") from error
        ms.runtime.dispatch_threads_num(threads)
        if self.size > 1:
            self._join()

    def _join(self) -> None:
        host, _, port = os.environ[COORDINATOR].rpartition(":")
        variables = {
            "MS_WORKER_NUM": str(self.size),
            "MS_SCHED_HOST": socket.gethostbyname(host),
            "MS_SCHED_PORT": port,
        }
        if self._rank == 0:
            command = [sys.executable, "-m", "accelmark.frameworks.mindspore.scheduler", str(os.getpid())]
            self._scheduler = subprocess.Popen(command, env={**os.environ, **variables, "MS_ROLE": "MS_SCHED"})
        os.environ.update(variables, MS_ROLE="MS_WORKER", MS_NODE_ID=str(self._rank))
        init("mccl" if self.is_cpu else "hccl")
        self._group = GlobalComm.WORLD_COMM_GROUP
        self._all_gather = ops.AllGather(self._group)
        self._broadcast = ops.Broadcast(0, self._group)
        self._all_reduce = ops.AllReduce("sum", self._group)

    @property
    def name(self) -> str | None:
        """The device's name; on the CPU that of the processor."""
        if self.is_cpu:
            return processor_name()
        return str(ms.hal.get_device_name())

    def means(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the mean of each float32 tensor over all ranks, with one exchange."""
        joint = self._all_reduce(ops.cat([tensor.reshape(-1) for tensor in tensors])) / self.size
        parts, start = [], 0
        for tensor in tensors:
            parts.append(joint[start : start + tensor.size].reshape(tensor.shape))
            start += tensor.size
        return tuple(parts)

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor."""
        return self._broadcast((tensor,))[0]

    def gather(self, values: list[float]) -> Callable[[], np.ndarray]:
        """Start to collect the float64 values of all ranks; the result has a row for each rank."""
        if self.size == 1 or not values:
            return lambda: np.array([values])
        joint = self._all_gather(Tensor(np.array(values, np.float64)))
        return lambda: joint.asnumpy().reshape(self.size, -1)

    def synchronize(self) -> None:
        """Wait for the device."""
        ms.runtime.synchronize()

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where MindSpore does not count."""
        return None if self.is_cpu else float(ms.runtime.max_memory_allocated()) / 2**20

    def leave(self, *, together: bool) -> None:
        """Leave the group, in step with the other ranks (``together``) unless they may be gone."""
        if together and self.size > 1:
            self.gather([0.0])()
            release()
        if self._scheduler is None:
            return
        try:
            self._scheduler.wait(_LEAVE_S if together else 0)
        except subprocess.TimeoutExpired:
            self._scheduler.kill()
            self._scheduler.wait()
