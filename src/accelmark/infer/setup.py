"""What the steps need around them: the device, the case, its data and model, the engine's request."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from accelmark.infer.batches import FirstBatches, MadeUpBatches
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest, device_name
from accelmark.infer.failures import EngineMissingError, IncompatibleEngineError
from accelmark.infer.registry import engine_class as find_engine_class
from accelmark.spec.catalog import folders
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.inference import InferPrecision, InferSettings, Note, file_at
from accelmark.spec.inference.events import InferStarted
from accelmark.spec.job import FolderRef, JobSpec
from accelmark.spec.work import InferJob

_LIBRARIES: Final = (
    "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torch-tensorrt", "transformers", "timm", "mlcommons-loadgen",
)  # fmt: skip
_MADE_UP_BATCHES: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where this process computes."""

    device: torch.device
    device_type: str
    threads: int
    framework_module: str | None
    needs_framework: bool
    """Whether PyTorch has to reach the device (it validates there)."""

    @classmethod
    def of(cls, job: JobSpec, settings: InferSettings) -> Place:
        """Read the place from a job; nothing is touched yet."""
        try:
            device = torch.device(job.device_type)
        except RuntimeError:
            device = torch.device("cpu")
        threads = settings.threads or len(os.sched_getaffinity(0))
        return cls(device, job.device_type, threads, job.framework_module, not settings.no_validation)

    def prepare(self) -> None:
        """Register the vendor's device with PyTorch, set the threads, and see that the device is there.

        Raises:
            EngineMissingError: validation needs the device, and PyTorch cannot reach it.
        """
        torch.set_num_threads(self.threads)
        try:
            if self.framework_module is not None:
                importlib.import_module(self.framework_module)
            if self.device.type != self.device_type:
                raise RuntimeError(f"PyTorch knows no device type {self.device_type!r}")
            torch.empty(1, device=self.device)
        except (ImportError, RuntimeError, AssertionError) as error:
            if self.needs_framework:
                raise EngineMissingError(
                    f"PyTorch cannot reach device {self.device_type!r} ({' '.join(str(error).split())[:200]}); "
                    "install what it needs, or set no_validation with exist_onnx_path"
                ) from error

    def describe(self, settings: InferSettings) -> InferStarted:
        """Return what really runs."""
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
    """Import ``infer_<framework>.py`` of the case's folder and build its ``Case``.

    Raises:
        RunError: there is no such file, or no ``Case`` in it.
    """
    name = f"infer_{job.key.framework}"
    path = job.case.path / f"{name}.py"
    if not path.is_file():
        raise RunError(f"{path}: is missing, so this case cannot infer in {job.key.framework}")
    module = _import(job.case, name, path)
    found = getattr(module, "Case", None)
    if not (isinstance(found, type) and issubclass(found, InferCase)):
        raise RunError(f"{path}: holds no class Case that subclasses accelmark.infer.case.InferCase")
    return found(infer.settings, infer.parameters, job.data_dirs)


def _import(folder: FolderRef, name: str, path: Path) -> object:
    if folder.package is not None:
        return importlib.import_module(f"{folder.package}.{name}")
    module_name = f"accelmark_case_{folder.name}.{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RunError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def batches_of(case: InferCase) -> InferBatches:
    """Return the case's data, made up or shortened as the settings say."""
    settings = case.settings
    if settings.synthetic:
        return MadeUpBatches(case.synthetic_batch, settings.batch_size, settings.max_batches or _MADE_UP_BATCHES)
    batches = case.build_dataloader()
    if settings.max_batches is not None and settings.max_batches * settings.batch_size < batches.num_items:
        return FirstBatches(batches, settings.max_batches, settings.batch_size)
    return batches


def plain(settings: InferSettings) -> InferPrecision:
    """Return the precision of the framework's validation: that of the engine, fp32 where that is quantised."""
    return "fp32" if settings.precision == "int8" else settings.precision


def engine_request(
    place: Place,
    settings: InferSettings,
    model: nn.Module | None,
    example: InferBatch,
    onnx_path: Path | None,
    work_dir: Path,
    precision: InferPrecision,
) -> EngineRequest:
    """Return what an engine is built from."""
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
    """Check what the settings name for the engine to read, before anything takes its time.

    Raises:
        RequestError: the engine loads no file and ``exist_compiler_path`` names one, or it is to compile an ONNX file
            and ``exist_onnx_path`` names none.
        IncompatibleEngineError: ``exist_compiler_path`` names a file that does not exist.
    """
    existing = settings.exist_compiler_path
    named = settings.exist_onnx_path
    if settings.compiler is None or (existing is None and named is None):
        return
    try:
        engine = engine_class(job, settings.compiler)
    except ImportError:
        return  # the step that builds the engine says what is missing
    if existing is None:
        if engine.reads == "onnx" and named is not None and file_at(named) is None:
            what = "is no file" if Path(named).expanduser().exists() else "does not exist"
            raise RequestError(f"exist_onnx_path: {named} {what}, and {settings.compiler} compiles an ONNX file")
        return
    if not engine.loads:
        raise RequestError(
            f"exist_compiler_path: the engine {settings.compiler} keeps no compiled engine and loads none; take it out"
        )
    if not Path(existing).expanduser().exists():
        raise IncompatibleEngineError(f"{existing}: exist_compiler_path names no file")


def unknown_options(engine: type[Engine], settings: InferSettings) -> Iterator[Note]:
    """Yield a warning for each of ``engine_options`` that the engine does not know, where it tells which it knows."""
    if engine.known_options is None:
        return
    for name in sorted(set(settings.engine_options) - engine.known_options):
        what = f"the engine {settings.compiler} knows no such option ({nearest(name, engine.known_options)})"
        yield Note(severity="warning", where="settings", key=f"engine_options.{name}", what=what)


def engine_class(job: JobSpec, compiler: str) -> type[Engine]:
    """Return the engine that the job names, the vendor's own first."""
    vendor = folders("vendors").get(job.vendor)
    return find_engine_class(compiler, vendor.path if vendor is not None else None)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(each.numel() for each in model.parameters())


def peak_host_memory_mib() -> float:
    """Return the largest resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def show_traceback(error: BaseException) -> None:
    """Write where an unexpected exception came from into the rank's log."""
    traceback.print_exception(error, file=sys.stderr)
