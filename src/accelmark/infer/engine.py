"""The interface of an inference engine, its memory and its errors, and the base of engines of PyTorch modules."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
import mmap
import os
import platform
import re
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from accelmark.datasets.verify import file_sha256
from accelmark.frameworks.pytorch.training.platform import forget_peak_memory, join_ranks, lock_pages, peak_memory_mib
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import AccelmarkError, DataError, RequestError, RunError, raising
from accelmark.spec.log.inference import InferEndReason, InferStarted
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.plugins.requirements import installed_versions
from accelmark.spec.settings.inference import EngineOption, InferPrecision, InferSettings, OptimizeFor, switch_option

_LIBRARIES: Final = (
    "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torch-tensorrt", "transformers", "timm", "mlcommons-loadgen",
)  # fmt: skip
Source = Literal["onnx", "model", "either"]
CALIBRATION_ITEMS: Final = 32
"""Items that int8 is calibrated on, at least."""
TimedCall = tuple[list[Tensor], float, float]
"""Outputs, begin and end of a call in s."""
DTYPES: Final[dict[InferPrecision, torch.dtype]] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precision -> element type; engines quantise to int8 themselves."""
Compute = Callable[[list[Tensor]], list[Tensor]]
_Recording = tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]
"""A graph with its inputs and outputs."""
GRAPH_DEVICE_TYPES: Final = frozenset({"cuda"})
"""Device types of PyTorch that have CUDA graphs; AMD devices are of type cuda, too."""


class GraphCalls:
    """A computation whose calls are replayed as CUDA graphs; the outputs of a call are overwritten by the next.

    It is recorded once for each shape of its inputs. Not tried on hardware; tests replay operators on the CPU.
    """

    def __init__(self, compute: Compute, device: torch.device, engine: str) -> None:
        """Prepare to record ``compute``. Raises RequestError: the device has no CUDA graphs."""
        if device.type not in GRAPH_DEVICE_TYPES:
            problem = f"cuda_graphs needs a device of type cuda, and this one is of type {device.type}"
            raise RequestError(f"{engine}: engine_options.{problem}; remove the option")
        self.compute = compute
        self.recordings: dict[tuple[tuple[torch.Size, torch.dtype], ...], _Recording] = {}

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy ``inputs`` to the recorded addresses, and replay; record first if their shapes are new."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self.recordings:
            self.recordings[key] = self._record(inputs)
        graph, copies, outputs = self.recordings[key]
        for target, tensor in zip_strict(copies, inputs):
            target.copy_(tensor, non_blocking=True)
        graph.replay()
        return outputs

    def _record(self, inputs: list[Tensor]) -> _Recording:
        copies = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # in which libraries choose algorithms and allocate their memory
                self.compute(copies)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.compute(copies)
        return graph, copies, outputs


@dataclass
class ComputeDevice:
    """The device of this process; creating it does not open the device."""

    device_type: str
    module: str | None
    """Registers the device with PyTorch, which need not support it unless ``required``."""
    threads: int
    required: bool
    collectives: str

    def __post_init__(self) -> None:
        try:
            self.device = torch.device(self.device_type)
        except RuntimeError:
            self.device = torch.device("cpu")
        self._pinned: list[Tensor] = []

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

    def pin(self, memory: Tensor) -> None:
        """Page-lock memory that is mapped, for asynchronous copies to an accelerator."""
        if self.device.type != "cpu":
            self._pinned.append(memory)  # unmapping it would leave pages locked
            lock_pages(self.device, memory)


@dataclass(frozen=True)
class EngineRequest:
    """The arguments of an engine."""

    model: nn.Module | None
    """In eval mode, fp32, on the CPU; None if ``no_validation`` is set."""
    onnx_path: Path | None
    """fp32, dynamic batch; None if nothing was exported and ``exist_onnx_path`` is not a file."""
    engine_path: Path | None
    """A compiled engine to load instead of compiling (``exist_compiler_path``)."""
    example: tuple[Tensor, ...]
    """One batch of inputs on the CPU, with the batch size that will be used."""
    precision: InferPrecision
    device: torch.device
    """The device that PyTorch uses."""
    device_type: str
    """The vendor's device type, which may be unknown to PyTorch."""
    threads: int
    optimize_for: OptimizeFor
    options: Mapping[str, EngineOption]
    work_dir: Path
    input_names: tuple[str, ...] = ()
    """Names of the inputs in the case's ONNX file, in the order in which they are given; empty: not known."""
    output_names: tuple[str, ...] = ()
    calibration: tuple[Tensor, ...] = ()
    """In int8, inputs of at least ``CALIBRATION_ITEMS`` items, of which neither accuracy nor speed is measured; the
    example is the first of them."""
    model_dir: Path | None = None
    """Directory of a language model in Hugging Face's layout; None for other cases."""
    num_devices: int = 1
    """Devices of the engine. With several, it is created in as many processes, which are the ranks of PyTorch's default
    process group and all get the same calls; ``device`` is the process's, and ``model`` is None."""

    def gives_model(self, reads: Source) -> bool:
        """Return whether an engine that reads ``reads`` compiles the PyTorch model."""
        return reads == "model" or (reads == "either" and self.onnx_path is None)


class Engine(ABC):
    """A compiled model. Subclass it as ``Engine`` in one file of ``infer/engines`` or of a vendor's ``engines`` folder.

    The constructor compiles (or loads ``request.engine_path``); its time is the compile time and not part of any
    throughput.
    """

    reads: ClassVar[Source] = "onnx"
    """Input of the compiler; for ``model`` nothing is exported, ``either`` gets the model where there is no file."""
    precisions: ClassVar[tuple[InferPrecision, ...]] = ("fp32",)
    fixed_batch: ClassVar[bool] = False
    """Whether each batch size is compiled separately; a queue then pads its batches."""
    known_options: ClassVar[frozenset[str] | None] = None
    """Supported names in ``engine_options``; others cause a warning. None: not declared, no warning."""
    generates: ClassVar[bool] = False
    iterates: ClassVar[bool] = False
    """Whether it computes an ``IterativeModel``, whose loop of dependent steps is not one static graph."""
    max_devices: ClassVar[int | None] = 1
    """Devices that it can spread one model over; None: any number."""
    loads: ClassVar[bool] = False
    """Whether it saves its compiled engine and can load one (``exist_compiler_path``)."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.concurrency = 1
        """Calls that are computed at the same time. An engine with more sets it in its constructor; it is then called
        from as many threads, and excludes no time."""
        self.file: Path | None = None
        """The compiled engine, if this engine saves one for ``exist_compiler_path``."""
        self.built_with: dict[str, str] = {}
        """Versions and other facts that an engine file depends on, which ``describe`` returns too."""
        if request.precision not in self.precisions:
            problem = f"{self.name} does not support {request.precision}; it supports {', '.join(self.precisions)}"
            raise InferenceError(problem, "bad_request")

    @property
    def name(self) -> str:
        """Name of the engine: the name of its file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch of CPU tensors; return CPU tensors and the seconds that were not inference (mostly 0).

        It runs in its own process, which has neither labels nor the data set. The caller reads the outputs some
        calls later, so do not return buffers that the next call overwrites.
        The seconds are between 0 and the duration of the call.
        """

    def submit(self, inputs: list[Tensor]) -> Future[tuple[list[Tensor], float]]:
        """Start a call in a thread. At most ``concurrency`` run."""
        return self._threads.submit(self, inputs)

    def concurrently(self, calls: Sequence[list[Tensor]]) -> list[TimedCall]:
        """Compute calls, ``concurrency`` at the same time; return outputs, begin and end of each (``perf_counter``).

        A runtime whose calls can be started and waited for in one thread overrides this: it is faster where calls are
        short, since no call passes to another thread.
        """

        def timed(inputs: list[Tensor]) -> TimedCall:
            begin = time.perf_counter()
            outputs, _ = self(inputs)
            return outputs, begin, time.perf_counter()

        return list(self._threads.map(timed, calls))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.concurrency, "calls")

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[Tensor]:
        """Yield the likeliest next token of each row of (batch, length) prompts on the CPU, ``num_tokens`` times."""
        raise NotImplementedError(f"engine {self.name}: generates no text")

    def logits(self, tokens: Tensor, num_last: int) -> Tensor:
        """Return the logits of the next token after each of the last ``num_last`` tokens, from one prefill.

        Accuracy benchmarks score continuations with them. ``tokens`` are prompts of the same length on the CPU, (batch,
        length); the logits are floating-point numbers on the CPU, (batch, num_last, vocabulary).
        """
        raise NotImplementedError(f"engine {self.name}: returns no logits")

    def describe(self) -> dict[str, str]:
        """Return versions, providers, devices and precision as the engine reports them."""
        return self.built_with

    def graph_types(self) -> dict[str, int] | None:
        """Return {type of the weights: number of matrix products and convolutions} of the compiled graph.

        Types are torch's names (``bfloat16``). None, as by default, where the graph cannot be read: the run is OPEN.
        """
        return None

    def fingerprint(self) -> dict[str, str]:
        """Return the properties that an engine file depends on: engine version, chip, precision."""
        return {
            "engine": self.name,
            "precision": self.request.precision,
            "device": device_name(self.request.device, self.request.device_type),
            **self.built_with,
        }

    def keep(self, path: Path) -> None:
        """Record ``path`` as the compiled engine, and write its fingerprint to a file next to it."""
        self.file = path
        text = json.dumps(self.fingerprint(), indent=2, sort_keys=True) + "\n"
        path.with_name(f"{path.name}.json").write_text(text, encoding="utf-8")

    def device_memory_mib(self) -> float | None:
        """Return the engine's peak device memory, or None if its runtime does not report it."""
        return None

    def onnx_file(self) -> Path:
        """Return the ONNX file to compile. Raises RequestError: there is none."""
        if self.request.onnx_path is None:
            raise RequestError(f"{self.name} compiles an ONNX file: set exist_onnx_path to null or to a file")
        return self.request.onnx_path

    def torch_model(self) -> nn.Module:
        """Return the PyTorch model to compile, in the constructor. Raises RequestError: there is none."""
        if self.request.model is None:
            raise RequestError(f"{self.name} compiles the PyTorch model: set no_validation to false")
        return self.request.model

    def engine_file(self) -> Path | None:
        """Return the compiled engine to load, None if it must be compiled. Raises InferenceError: it is another's."""
        path = self.request.engine_path
        if path is None or not (file := path.with_name(f"{path.name}.json")).is_file():
            return path
        with raising(RequestError, f"{file}: not an engine's fingerprint; compile the engine again", ValueError):
            recorded = json.loads(file.read_text(encoding="utf-8"))
        differing = [
            f"{key} {recorded.get(key)!r} instead of {value!r}"
            for key, value in self.fingerprint().items()
            if recorded.get(key) != value
        ]
        if differing:
            raise InferenceError(f"{path}: built for {'; '.join(differing)}; compile it again", "incompatible_engine")
        return path

    def named(self, kind: Literal["inputs", "outputs"], names: Sequence[str]) -> list[str]:
        """Return the compiled model's inputs or outputs, ``names``, in the order of the case's.

        In a model without any of the case's names, the model's order is kept. Raises InferenceError: only some have a
        name of the case's, or their numbers differ.
        """
        expected = self.request.input_names if kind == "inputs" else self.request.output_names
        if not expected or set(expected) == set(names):
            return list(expected or names)
        if not set(expected).intersection(names) and (kind == "outputs" or len(expected) == len(names)):
            return list(names)
        problem = f"{self.name}: the model has the {kind} {', '.join(names)}, the case {', '.join(expected)}"
        raise InferenceError(f"{problem}; export it again, or name them alike", "wrong_shape")

    def package(self, name: str) -> Any:
        """Import the engine's package. Raises InferenceError: it cannot be imported."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problem = f"{self.name} is not available: {name} cannot be imported ({error})"
            raise InferenceError(f"{problem}; install it or choose another engine", "engine_missing") from error

    def incompatible(self, path: Path, error: object) -> InferenceError:
        """Return the error for an engine file that cannot be loaded."""
        problem = f"{path}: {self.name} cannot load this engine on this chip and version; compile it again"
        return InferenceError(f"{problem} ({shortened(error, 300)})", "incompatible_engine")


def device_name(device: torch.device, device_type: str) -> str:
    """Return the name of an accelerator, the CPU with its widest vector extension, or the device type."""
    if device_type != device.type:
        return device_type
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name(device))


def as_list(outputs: object) -> list[Tensor]:
    """Return a model's outputs, one tensor or a sequence of them, as a list. Raises TypeError: no tensors."""
    parts = [outputs] if isinstance(outputs, Tensor) else list(outputs) if isinstance(outputs, (tuple, list)) else None
    if parts is None or not all(isinstance(each, Tensor) for each in parts):
        raise TypeError(f"the model returns {type(outputs).__name__}, expected a tensor or a tuple of tensors")
    return parts


def check_outputs(result: object, engine: str, items: int | None = None, rows: Rows | None = None) -> None:
    """Check what an engine returns for a call of ``items`` items, each of the types and shapes ``rows``."""
    outputs = result[0] if isinstance(result, tuple) and len(result) == 2 else None
    if (
        not isinstance(outputs, (list, tuple))
        or not outputs
        or not all(isinstance(output, Tensor) and output.device.type == "cpu" for output in outputs)
    ):
        problem = f"returns {shortened(result, 100)}; it must return (outputs, seconds), a list of tensors on the CPU"
        raise InferenceError(f"engine {engine}: {problem}")
    for output in outputs:
        if items is not None and output.shape[:1] != (items,):
            problem = f"returns {output.shape[0] if output.ndim else 'no'} rows for {items} items"
            raise InferenceError(f"engine {engine}: {problem}; export the model with a dynamic batch", "wrong_shape")
    if rows is not None and rows_of(outputs) != rows:
        problem = f"returns {rows_of(outputs)}, in its warm-up {rows}"
        raise InferenceError(f"engine {engine}: {problem} (types and shapes of an item)", "wrong_shape")


def check_separate_memory(calls: Sequence[Sequence[Tensor]], engine: str) -> None:
    """Check that no call has overwritten the outputs of another: all are still referenced."""
    owned = [(each, number) for number, outputs in enumerate(calls) for each in outputs if each.nbytes]
    reached, owner = 0, -1
    for begin, end, number in sorted(
        (each.data_ptr(), each.data_ptr() + each.nbytes, number) for each, number in owned
    ):
        if begin < reached and number != owner:
            raise InferenceError(
                f"engine {engine}: outputs of two calls share memory; outputs belong to the caller, "
                "so copy a buffer that the next call overwrites"
            )
        if end > reached:
            reached, owner = end, number


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file with its external weights (``.data``), or over the files of a directory."""
    if not path.exists():
        raise DataError(f"{path}: does not exist, so it cannot be hashed")
    files = sorted(path.rglob("*")) if path.is_dir() else [path, path.with_name(f"{path.name}.data")]
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()


class TorchEngine(Engine):
    """An engine whose inputs and outputs are tensors on PyTorch's device; a subclass implements ``compute``.

    ``engine_options.channels_last`` sets the memory format of images; by default it is used on accelerators by models
    with two-dimensional convolutions. With ``engine_options.cuda_graphs``, where a subclass declares it, calls are
    recorded at the first call of their shapes and replayed.
    """

    reads: ClassVar[Source] = "model"
    precisions: ClassVar[tuple[InferPrecision, ...]] = ("fp32", "tf32", "bf16", "fp16")
    known_options: ClassVar[frozenset[str] | None] = frozenset({"channels_last"})

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        self.matrix_types: dict[str, int] | None = None
        """Null for an engine that was loaded."""
        # Disable tf32 in matrix products and convolutions unless it was requested.
        tf32 = request.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        self.channels_last = False
        if self.device.type != "cpu":
            # Shapes repeat, so cuDNN selects the fastest convolution algorithms once, during the warm-up.
            torch.backends.cudnn.benchmark = True
            # exclude the peak of the validation's engine
            forget_peak_memory(self.device)
        self.run_on_device = self.compute
        if "cuda_graphs" in (self.known_options or ()) and switch_option(request.options, "cuda_graphs"):
            self.run_on_device = GraphCalls(self.compute, self.device, self.name)

    @abstractmethod
    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute one batch that is on the device and in the precision; outputs stay there."""

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        return self.call(inputs), 0.0

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, compute it in inference mode, and copy its outputs back."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.call(inputs)
        return [output.cpu() for output in self.run_on_device(self.to_device(inputs))]

    def to_device(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, and convert it there: the CPU converts more slowly than it copies."""
        return [self._converted(tensor.to(self.device, non_blocking=True)) for tensor in inputs]

    def _converted(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        is_image = self.channels_last and tensor.ndim == 4
        return tensor.to(self.dtype, memory_format=torch.channels_last if is_image else torch.preserve_format)

    def graph_types(self) -> dict[str, int] | None:
        """Return the types of the model's matrices, in which their products are computed."""
        return self.matrix_types

    def placed_model(self) -> nn.Module:
        """Return the model on the device and in the precision; it shares the weights that are there already."""

        def placed(tensor: Tensor) -> Tensor:
            on_device = tensor.detach().to(self.device)
            return on_device.to(self.dtype) if tensor.is_floating_point() else on_device

        model = self.torch_model()
        tensors: dict[int, object] = {id(each): nn.Parameter(placed(each), False) for each in model.parameters()}
        tensors |= {id(buffer): placed(buffer) for buffer in model.buffers()}
        copied: nn.Module = copy.deepcopy(model, tensors)  # of the modules: their tensors are in ``tensors``
        return copied.to(self.device)  # a language model keeps its rotary frequencies in fp32 by it

    def model_on_device(self) -> nn.Module:
        """Return the placed model in eval mode and in the memory format of ``engine_options.channels_last``."""
        model = self.placed_model().eval()
        matrices = (parameter for parameter in model.parameters() if parameter.ndim > 1)
        self.matrix_types = dict(Counter(str(matrix.dtype).removeprefix("torch.") for matrix in matrices))
        has_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        default = self.device.type != "cpu" and has_images
        self.channels_last = switch_option(self.request.options, "channels_last", default=default)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return super().describe() | {"torch": torch.__version__, "dtype": str(self.dtype)}

    def device_memory_mib(self) -> float | None:
        """Return the peak of PyTorch's allocator on an accelerator, None on the CPU."""
        return peak_memory_mib(self.device)


Rows = tuple[tuple[str, tuple[int, ...]], ...]
"""Element type and shape of an item, for each tensor of a batch."""


def mapped(descriptor: int) -> Tensor:
    """Return all bytes of the file, mapped."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


def rows_of(batch: Sequence[Tensor]) -> Rows:
    """Return the element type and the shape of an item of each tensor."""
    return tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for tensor in batch)


class Slots(NamedTuple):
    """``num_slots`` slots of up to ``slot_items`` items; a slot has an aligned region for each tensor of a batch."""

    rows: Rows
    slot_items: int
    num_slots: int

    def item_bytes(self) -> list[int]:
        """Return the bytes of an item, for each tensor."""
        return [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in self.rows]

    def _regions(self) -> list[int]:
        return [-(-self.slot_items * each // 64) * 64 for each in self.item_bytes()]  # aligned

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(self._regions())

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def views(self, memory: Tensor, slot: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of a slot as tensors."""
        return [each[0] for each in self.blocks(memory, slot, 1, items)]

    def blocks(self, memory: Tensor, slot: int, num_slots: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of each of the slots from ``slot`` on, as tensors (slots, items, ...)."""
        tensors: list[Tensor] = []
        regions = self._regions()
        begin = memory.storage_offset() + slot * sum(regions)
        for (dtype, shape), size, region in zip_strict(self.rows, self.item_bytes(), regions):
            rows = memory.as_strided((num_slots, items * size), (sum(regions), 1), begin)
            tensors.append(rows.view(getattr(torch, dtype)).view(num_slots, items, *shape))
            begin += region
        return tensors


class InferenceError(RunError):
    """An inference run ended early; the message has the cause and the remedy."""

    def __init__(self, message: str, end_reason: InferEndReason = "error") -> None:
        super().__init__(message)
        self.end_reason: InferEndReason = end_reason


class EngineExceptionError(Exception):
    """An exception of the engine's process, as ``Type: message``."""


def described(error: Exception) -> dict[str, str]:
    """Return an exception of the engine's process as a message to the rank."""
    if isinstance(error, AccelmarkError):
        return {"error": str(error), "end_reason": end_reason_of(error)}
    return {"error": f"{type(error).__name__}: {error}"}


class Context(NamedTuple):
    """The call in which an engine failed, for the message."""

    activity: str
    engine: str
    batch_size: int
    device: str


_KINDS: Final[dict[InferEndReason, tuple[str, str]]] = {
    "out_of_memory": (
        r"out of memory|bad_alloc|MemoryError|can't allocate memory|failed to allocate memory|Cannot allocate memory"
        r"|OutOfMemory|allocation of .* failed",
        "out of memory at batch {size}; try a smaller batch_size, more memory or a narrower precision",
    ),
    "unsupported_operator": (
        r"Could not find an implementation for|No Op registered for|is not a registered function/op"
        r"|does not support the following ONNX operations|No conversion rule found for operations"
        r"|No importer registered for op|Unsupported operator",
        "an operator is not supported; choose another engine, or replace the operator in the model ({text})",
    ),
    "corrupt_model": (
        r"protobuf parsing failed|InvalidProtobuf|ModelProto does not have a graph|No graph was found|invalid ?graph"
        r"|Error parsing message|Unable to read the model|failed to parse|Missing opset",
        "the model file is not readable; export it again ({text})",
    ),
    "wrong_shape": (
        r"Got invalid dimensions|Invalid rank for input|Unexpected input data type|shapes? cannot be multiplied"
        r"|expected input.* to have \d+ channels|size mismatch|incompatible with|is not compatible|shape mismatch"
        r"|Expected \d+-dimensional|Expected \d+D|must match the size|invalid for input of size"
        r"|index out of range in self|are incompatible|shape\.compatible|tensor size doesn't match"
        r"|not compatible with the model|input tensor shape",
        "the inputs do not match the model; compare their shapes and types with the exported model ({text})",
    ),
}
"""End reason -> the words of runtimes in such an error, and its cause and remedy."""


def classify(error: BaseException, context: Context) -> AccelmarkError:
    """Return ``error`` with its end reason; an :class:`AccelmarkError` is returned unchanged."""
    if isinstance(error, AccelmarkError):
        return error
    text = str(error) if isinstance(error, EngineExceptionError) else f"{type(error).__name__}: {error}"
    place = f"{context.engine} on {context.device}, {context.activity}"
    for end_reason, (words, problem) in _KINDS.items():
        if re.search(words, text, re.IGNORECASE):
            problem = problem.format(size=context.batch_size, text=shortened(text, 400))
            return InferenceError(f"{place}: {problem}", end_reason)
    return InferenceError(f"{place}: {shortened(text, 400)}")


def shortened(text: object, limit: int) -> str:
    """Return a message on one line, cut after ``limit`` characters."""
    return " ".join(str(text).split())[:limit]


def end_reason_of(error: BaseException) -> InferEndReason:
    """Return the end reason of a run that ``error`` ended."""
    if isinstance(error, InferenceError):
        return error.end_reason
    if isinstance(error, DataError):
        return "bad_data"
    return "bad_request" if isinstance(error, RequestError) else "error"
