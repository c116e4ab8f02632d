"""The device of an inference process, and the versions of its software."""

from __future__ import annotations

import importlib
import os
import platform
import socket
from typing import Final, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from accelmark.frameworks.pytorch.training.platform import join_ranks, lock_pages
from accelmark.infer.engine import device_name
from accelmark.infer.failures import InferenceError, shortened
from accelmark.spec.job import JobSpec
from accelmark.spec.log.inference import InferStarted
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.plugins.requirements import installed_versions
from accelmark.spec.settings.inference import InferSettings

_LIBRARIES: Final = (
    "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torch-tensorrt", "transformers", "timm", "mlcommons-loadgen",
)  # fmt: skip


@final
class ComputeDevice:
    """The device of this process; creating it does not open the device."""

    def __init__(self, *, device_type: str, module: str | None, threads: int, required: bool, collectives: str) -> None:
        """Describe the device; ``module`` registers it with PyTorch, which need not support it unless ``required``."""
        try:
            self.device = torch.device(device_type)
        except RuntimeError:
            self.device = torch.device("cpu")
        self.device_type = device_type
        self.threads = threads
        self.module = module
        self.required = required
        self.collectives = collectives
        self._pinned: list[Tensor] = []

    @classmethod
    def of(cls, job: JobSpec, settings: InferSettings) -> ComputeDevice:
        """Return the device of a job."""
        return cls(
            device_type=job.device_type,
            module=job.framework_module,
            threads=settings.threads or len(os.sched_getaffinity(0)),
            required=not settings.no_validation,
            collectives=job.collective_backend,
        )

    def prepare(self, place: RankPlace = RankPlace()) -> None:  # noqa: B008 - frozen
        """Register the vendor's device with PyTorch, set the number of threads, and open the device.

        Of several processes, each opens one device, has a share of the threads, and joins the process group.

        Raises InferenceError: validation needs the device, and PyTorch cannot use it.
        """
        self.threads = max(1, self.threads // place.local_world_size)
        torch.set_num_threads(self.threads)
        try:
            if self.module is not None:
                importlib.import_module(self.module)
            if self.device.type != self.device_type:
                raise RuntimeError(f"unknown device type {self.device_type!r}")
            if place.world_size > 1:
                if self.device.type != "cpu":
                    self.device = torch.device(self.device.type, place.local_rank)
                    torch.get_device_module(self.device).set_device(self.device)
                store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
                join_ranks(self.collectives, place, self.device, needed=True, store=store)
            torch.empty(1, device=self.device)
        except (ImportError, RuntimeError, AssertionError) as error:
            if self.required:
                problem = f"PyTorch cannot use device {self.device_type!r} ({shortened(error, 200)})"
                remedy = "install its PyTorch support, or set no_validation with exist_onnx_path"
                raise InferenceError(f"{problem}; {remedy}", "engine_missing") from error

    def pin(self, memory: Tensor) -> None:
        """Page-lock memory that is mapped, for asynchronous copies to an accelerator."""
        if self.device.type != "cpu":
            self._pinned.append(memory)  # unmapping it would leave pages locked
            lock_pages(self.device, memory)

    def describe(self, settings: InferSettings) -> InferStarted:
        """Return versions, device and effective settings."""
        return InferStarted(
            framework="pytorch",
            framework_version=torch.__version__,
            device_type=self.device_type,
            device_name=None if settings.no_validation else device_name(self.device, self.device_type),
            hostname=socket.gethostname(),
            threads=self.threads,
            precision=settings.precision,
            compiler=settings.compiler,
            isolated=True,
            counts_own_memory=True,
            library_versions={"python": platform.python_version()} | installed_versions(_LIBRARIES),
        )
