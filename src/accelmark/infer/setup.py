"""Set up a run: device, case, data, and the engine's request."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from accelmark.infer.batches import FirstBatches, PinnedBatches, SyntheticBatches
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest, device_name
from accelmark.infer.engines import engine_class as find_engine_class
from accelmark.infer.failures import EngineMissingError, IncompatibleEngineError
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.events import InferStarted
from accelmark.spec.inference import InferPrecision, InferSettings, Note, file_at
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.plugins.catalog import folder_module, folders

_LIBRARIES: Final = (
    "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torch-tensorrt", "transformers", "timm", "mlcommons-loadgen",
)  # fmt: skip
_SYNTHETIC_BATCHES: Final = 32


@final
@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The device of this process."""

    device: torch.device
    device_type: str
    threads: int
    framework_module: str | None
    needs_framework: bool
    """Whether PyTorch needs the device, for the validation."""

    @classmethod
    def of(cls, job: JobSpec, settings: InferSettings) -> ComputeDevice:
        """Return the device of a job without opening it."""
        try:
            device = torch.device(job.device_type)
        except RuntimeError:
            device = torch.device("cpu")
        threads = settings.threads or len(os.sched_getaffinity(0))
        return cls(device, job.device_type, threads, job.framework_module, not settings.no_validation)

    def prepare(self) -> None:
        """Register the vendor's device with PyTorch, set the number of threads, and open the device.

        Raises:
            EngineMissingError: validation needs the device, and PyTorch cannot use it.
        """
        torch.set_num_threads(self.threads)
        try:
            if self.framework_module is not None:
                importlib.import_module(self.framework_module)
            if self.device.type != self.device_type:
                raise RuntimeError(f"unknown device type {self.device_type!r}")
            torch.empty(1, device=self.device)
        except (ImportError, RuntimeError, AssertionError) as error:
            if self.needs_framework:
                raise EngineMissingError(
                    f"PyTorch cannot use device {self.device_type!r} ({' '.join(str(error).split())[:200]}); "
                    "install its PyTorch support, or set no_validation with exist_onnx_path"
                ) from error

    def describe(self, settings: InferSettings) -> InferStarted:
        """Return versions, device and effective settings."""
        return InferStarted(
            framework="pytorch",
            framework_version=torch.__version__,
            device_type=self.device_type,
            device_name=device_name(self.device, self.device_type) if self.needs_framework else None,
            hostname=socket.gethostname(),
            threads=self.threads,
            precision=settings.precision,
            compiler=settings.compiler,
            library_versions={"python": platform.python_version(), **_versions()},
        )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def build_case(job: JobSpec, infer: InferJob) -> InferCase:
    """Import ``infer_<framework>.py`` of the case's folder and create its ``Case``.

    Raises:
        RunError: there is no such file, or it defines no ``Case``.
    """
    name = f"infer_{job.key.framework}"
    path = job.case.path / f"{name}.py"
    if not path.is_file():
        raise RunError(f"{path}: does not exist; the case has no inference in {job.key.framework}")
    found = getattr(folder_module(job.case, name), "Case", None)
    if not (isinstance(found, type) and issubclass(found, InferCase)):
        raise RunError(f"{path}: defines no class Case derived from accelmark.infer.case.InferCase")
    return found(infer.settings, infer.parameters, job.data_dirs)


def batches_of(case: InferCase, *, pinned: bool) -> InferBatches:
    """Return the case's data, synthetic or shortened according to the settings, in page-locked memory if ``pinned``."""
    settings = case.settings
    if settings.synthetic:
        num_batches = settings.max_batches or _SYNTHETIC_BATCHES

        def make(size: int) -> InferBatch:
            batch = case.synthetic_batch(size)
            return batch.pinned() if pinned else batch

        return SyntheticBatches(make, settings.batch_size, num_batches)
    batches = case.build_dataloader()
    if pinned:
        batches = PinnedBatches(batches)
    if settings.max_batches is not None and settings.max_batches * settings.batch_size < batches.num_items:
        return FirstBatches(batches, settings.max_batches, settings.batch_size)
    return batches


def validation_precision(settings: InferSettings) -> InferPrecision:
    """Return the precision of the validation: the engine's, or fp32 if that is quantised."""
    return "fp32" if settings.precision == "int8" else settings.precision


def engine_request(
    place: ComputeDevice,
    settings: InferSettings,
    model: nn.Module | None,
    example: InferBatch,
    onnx_path: Path | None,
    work_dir: Path,
    precision: InferPrecision,
) -> EngineRequest:
    """Return the arguments of an engine."""
    existing = settings.exist_compiler_path
    work_dir.mkdir(parents=True, exist_ok=True)
    return EngineRequest(
        model=model,
        onnx_path=onnx_path or file_at(settings.exist_onnx_path),
        engine_path=Path(existing).expanduser() if existing is not None else None,
        example=example.inputs,
        precision=precision,
        device=place.device,
        device_type=place.device_type,
        threads=place.threads,
        options=settings.engine_options,
        work_dir=work_dir,
    )


def check_paths(job: JobSpec, settings: InferSettings) -> None:
    """Check the files that the settings name for the engine, before any work starts.

    Raises:
        RequestError: ``exist_compiler_path`` is set and the engine cannot load a file, or the engine compiles an ONNX
            file and ``exist_onnx_path`` is not a file.
        IncompatibleEngineError: the file of ``exist_compiler_path`` does not exist.
    """
    existing = settings.exist_compiler_path
    named = settings.exist_onnx_path
    if settings.compiler is None or (existing is None and named is None):
        return
    try:
        engine = engine_class(job, settings.compiler)
    except ImportError:
        return  # the compile step reports what is missing
    if existing is None:
        if engine.reads == "onnx" and named is not None and file_at(named) is None:
            what = "is not a file" if Path(named).expanduser().exists() else "does not exist"
            raise RequestError(f"exist_onnx_path: {named} {what}, and {settings.compiler} compiles an ONNX file")
        return
    if not engine.loads:
        raise RequestError(
            f"exist_compiler_path: the engine {settings.compiler} cannot load a compiled engine; remove the setting"
        )
    if not Path(existing).expanduser().exists():
        raise IncompatibleEngineError(f"{existing}: exist_compiler_path does not exist")


def unknown_options(engine: type[Engine], settings: InferSettings) -> Iterator[Note]:
    """Yield a warning for each of ``engine_options`` that the engine does not declare."""
    if engine.known_options is None:
        return
    for name in sorted(set(settings.engine_options) - engine.known_options):
        what = f"unknown option of the engine {settings.compiler} ({nearest(name, engine.known_options)})"
        yield Note(severity="warning", where="settings", key=f"engine_options.{name}", what=what)


def engine_class(job: JobSpec, compiler: str) -> type[Engine]:
    """Return the class of the job's engine; the vendor's own takes precedence."""
    vendor = folders("vendors").get(job.vendor)
    return find_engine_class(compiler, vendor.path if vendor is not None else None)


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(each.numel() for each in model.parameters())


def peak_host_memory_mib() -> float:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
