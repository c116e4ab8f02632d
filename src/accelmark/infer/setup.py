"""Set up a run: device, case, data and engine."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from accelmark.frameworks.pytorch.training.platform import join_ranks, lock_pages
from accelmark.infer.batches import first_batches, pinned_batches, synthetic_batches
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import CALIBRATION_ITEMS, device_name
from accelmark.infer.failures import InferenceError, shortened
from accelmark.infer.language_model.case import LanguageModelCase
from accelmark.serving.model import ServedModel
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.inference import InferStarted
from accelmark.spec.plugins.catalog import engine_specs, folder_module, folders
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.inference import InferPrecision, InferSettings, Note, file_at

_LIBRARIES: Final = (
    "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torch-tensorrt", "transformers", "timm", "mlcommons-loadgen",
)  # fmt: skip
_SYNTHETIC_BATCHES: Final = 32


@final
@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the class of an engine states about itself."""

    reads: str
    loads: bool
    fixed_batch: bool
    generates: bool
    iterates: bool
    has_logits: bool
    max_devices: int | None
    known_options: Sequence[str] | None


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

    def values(self) -> dict[str, Any]:
        """Return the arguments of an equal device, as JSON values."""
        return {
            "device_type": self.device_type, "module": self.module, "threads": self.threads, "required": self.required,
            "collectives": self.collectives,
        }  # fmt: skip

    def prepare(self, place: RankPlace = RankPlace()) -> None:  # noqa: B008 - frozen
        """Register the vendor's device with PyTorch, set the number of threads, and open the device.

        Of several processes, each opens one device, has a share of the threads, and joins the process group.

        Raises:
            InferenceError: validation needs the device, and PyTorch cannot use it.
        """
        self.threads = max(1, self.threads // place.local_world_size)
        torch.set_num_threads(self.threads)
        try:
            if self.module is not None:
                importlib.import_module(self.module)
            if self.device.type != self.device_type:
                raise RuntimeError(f"unknown device type {self.device_type!r}")
            if place.world_size > 1:
                self._join(place)
            torch.empty(1, device=self.device)
        except (ImportError, RuntimeError, AssertionError) as error:
            if self.required:
                what = f"PyTorch cannot use device {self.device_type!r} ({shortened(error, 200)})"
                remedy = "install its PyTorch support, or set no_validation with exist_onnx_path"
                raise InferenceError(f"{what}; {remedy}", "engine_missing") from error

    def _join(self, place: RankPlace) -> None:
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, place.local_rank)
            torch.get_device_module(self.device).set_device(self.device)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False)
        join_ranks(self.collectives, place, self.device, needed=True, store=store)

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


def build_case(job: JobSpec, infer: InferJob, node_dir: Path) -> InferCase:
    """Import ``infer_<framework>.py`` of the case's folder and create its ``Case``.

    A language model that the case packages is written below ``node_dir``.

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
    if issubclass(found, LanguageModelCase):
        return found(infer.settings, infer.parameters, job.data_dirs, ServedModel(job, node_dir))
    return found(infer.settings, infer.parameters, job.data_dirs)


def batches_of(case: InferCase, *, pinned: bool) -> InferBatches:
    """Return the case's data, synthetic or shortened according to the settings, in page-locked memory if ``pinned``."""
    settings = case.settings
    if settings.synthetic:
        num_batches = settings.max_batches or _SYNTHETIC_BATCHES

        def make(size: int) -> InferBatch:
            batch = case.synthetic_batch(size)
            return batch.pinned() if pinned else batch

        return synthetic_batches(make, settings.batch_size, num_batches)
    batches = case.build_dataloader()
    if pinned:
        batches = pinned_batches(batches)
    if settings.max_batches is not None and settings.max_batches * settings.batch_size < batches.num_items:
        return first_batches(batches, settings.max_batches, settings.batch_size)
    return batches


def calibration_inputs(case: InferCase, settings: InferSettings, precision: InferPrecision) -> tuple[Tensor, ...]:
    """Return the inputs that an engine is calibrated on, if it compiles in int8; of synthetic data, none measured."""
    if precision != "int8" or settings.exist_compiler_path is not None:
        return ()
    make = case.synthetic_batch if settings.synthetic else case.calibration_batch
    return make(max(settings.batch_size, CALIBRATION_ITEMS)).inputs


def vendor_folder(job: JobSpec) -> Path | None:
    """Return the folder of the job's vendor, whose engines take precedence; None where there is none."""
    vendor = folders("vendors").get(job.vendor)
    return vendor.path if vendor is not None else None


def declares_onnx(job: JobSpec, settings: InferSettings) -> bool:
    """Return whether the engine is declared to need what exports ONNX files; known before its process has started."""
    engine = engine_specs(vendor_folder(job)).get(settings.compiler or "")
    return engine is not None and any(each.startswith("onnxscript") for each in engine.requires)


def check_paths(engine: EngineFacts, settings: InferSettings) -> None:
    """Check the files that the settings name for the engine, before any work starts.

    Raises:
        RequestError: ``exist_compiler_path`` is set and the engine cannot load a file, or the engine compiles an ONNX
            file and ``exist_onnx_path`` is not a file.
        InferenceError: the file of ``exist_compiler_path`` does not exist.
    """
    existing = settings.exist_compiler_path
    named = settings.exist_onnx_path
    if existing is None:
        if engine.reads == "onnx" and named is not None and file_at(named) is None:
            what = "is not a file" if Path(named).expanduser().exists() else "does not exist"
            raise RequestError(f"exist_onnx_path: {named} {what}, and {settings.compiler} compiles an ONNX file")
        return
    if not engine.loads:
        what = f"exist_compiler_path: the engine {settings.compiler} cannot load a compiled engine"
        raise RequestError(f"{what}; remove the setting")
    if not Path(existing).expanduser().exists():
        raise InferenceError(f"{existing}: exist_compiler_path does not exist", "incompatible_engine")


def check_generation(engine: EngineFacts, case: InferCase, settings: InferSettings) -> None:
    """Check that the case and the engine can generate text, where the settings want it.

    Raises:
        RequestError: one of them cannot.
    """
    if not settings.generate_batches:
        return
    if not isinstance(case, LanguageModelCase):
        raise RequestError("generate_batches: the case is not a language model; take the setting out")
    if not engine.generates:
        what = f"generate_batches: the engine {settings.compiler} generates no text"
        raise RequestError(f"{what}; choose another (--compiler eager), or set generate_batches to []")
    if settings.benchmarks and not engine.has_logits:
        what = f"benchmarks: the engine {settings.compiler} returns no logits (method logits)"
        raise RequestError(f"{what}; choose another (--compiler eager), or set benchmarks to []")


def check_iterative(engine: EngineFacts, settings: InferSettings, *, iterative: bool) -> None:
    """Check that the engine can compute a model of dependent steps, if the case has one.

    Raises:
        RequestError: it cannot.
    """
    if iterative and not engine.iterates:
        what = f"the engine {settings.compiler} compiles one static graph; the case's answers take dependent steps"
        raise RequestError(f"{what}; choose another (--compiler eager)")


def check_devices(engine: EngineFacts, settings: InferSettings, num_devices: int) -> None:
    """Check that the engine can spread a model over the devices of the key.

    Raises:
        RequestError: it cannot.
    """
    if engine.max_devices is not None and num_devices > engine.max_devices:
        what = f"the engine {settings.compiler} computes on {engine.max_devices} of {num_devices} devices"
        raise RequestError(f"{what}; choose another (--compiler eager), or lower the fifth part of the key")


def unknown_options(engine: EngineFacts, settings: InferSettings) -> Iterator[Note]:
    """Yield a warning for each of ``engine_options`` that the engine does not declare."""
    if engine.known_options is None:
        return
    for name in sorted(set(settings.engine_options).difference(engine.known_options)):
        what = f"unknown option of the engine {settings.compiler} ({nearest(name, engine.known_options)})"
        yield Note(severity="warning", where="settings", key=f"engine_options.{name}", what=what)


def peak_host_memory_mib() -> float:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
