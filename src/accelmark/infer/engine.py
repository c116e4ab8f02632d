"""What an engine is: a compiler and its runtime behind one small class."""

from __future__ import annotations

import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal, final

import torch
from torch import Tensor, nn

from accelmark.infer.failures import CorruptModelError, EngineMissingError, IncompatibleEngineError, PrecisionError
from accelmark.spec.errors import RequestError
from accelmark.spec.inference import EngineOption, InferPrecision

DTYPES: Final[dict[InferPrecision, torch.dtype]] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The element type that a precision stores; int8 is a matter of the engine's own quantisation."""


@final
@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Everything an engine is built from."""

    model: nn.Module | None
    """In eval mode, fp32, on the CPU; None where ``no_validation`` is set."""
    onnx_path: Path | None
    """fp32, dynamic batch; None where nothing was exported and ``exist_onnx_path`` names no file."""
    engine_path: Path | None
    """A compiled engine to load instead of compiling (``exist_compiler_path``)."""
    example: tuple[Tensor, ...]
    """One batch of inputs on the CPU, with the batch size that will be used."""
    precision: InferPrecision
    device: torch.device
    """Where PyTorch computes."""
    device_type: str
    """The vendor's device type, which PyTorch may not know."""
    threads: int
    options: Mapping[str, EngineOption]
    work_dir: Path
    """Where the engine may leave files: a compiled engine to keep, caches."""


class Engine(ABC):
    """A compiled model. Subclass it as ``Engine`` in one file of ``infer/engines`` or of a vendor's ``engines`` folder.

    Building it compiles (or loads ``request.engine_path``), once; its time is the compile time and counts for no
    throughput.
    """

    reads: ClassVar[Literal["onnx", "model"]] = "onnx"
    """What it compiles from."""
    precisions: ClassVar[tuple[InferPrecision, ...]] = ("fp32",)
    fixed_batch: ClassVar[bool] = False
    """Whether another batch size means compiling again, so that a queue had better fill batches up."""
    known_options: ClassVar[frozenset[str] | None] = None
    """Names that it reads among ``engine_options``, so that others are warned of; None where it does not tell."""
    loads: ClassVar[bool] = False
    """Whether it keeps a compiled engine, and loads the one that ``exist_compiler_path`` names."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.file: Path | None = None
        """The compiled engine, if this engine keeps one that ``exist_compiler_path`` can name later."""
        if request.precision not in self.precisions:
            known = ", ".join(self.precisions)
            raise PrecisionError(f"{self.name} does not compute in {request.precision}; it knows {known}")

    @property
    def name(self) -> str:
        """The engine's name: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch: CPU tensors in; CPU tensors out, with the seconds that were not inference (mostly 0).

        The outputs belong to the caller, who looks at them some calls later: a buffer that the next call writes to has
        to be copied. The seconds lie between 0 and what the call takes.
        """

    def describe(self) -> dict[str, str]:
        """Return versions, providers, devices and precision as the engine itself reports them."""
        return {}

    def fingerprint(self) -> dict[str, str]:
        """Return what an engine file is bound to: this engine's version, the chip, the precision."""
        return {
            "engine": self.name,
            "precision": self.request.precision,
            "device": device_name(self.request.device, self.request.device_type),
        }

    def keep(self, path: Path) -> None:
        """Remember ``path`` as the compiled engine, with its fingerprint in a file beside it."""
        self.file = path
        beside(path).write_text(json.dumps(self.fingerprint(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def device_memory_mib(self) -> float | None:
        """Return the largest device memory this engine has held, where its runtime can tell."""
        return None

    def close(self) -> None:
        """Give back what the engine holds."""
        return

    def onnx_file(self) -> Path:
        """Return the ONNX file to compile.

        Raises:
            RequestError: there is none.
            CorruptModelError: there is nothing in it.
        """
        if self.request.onnx_path is None:
            raise RequestError(f"{self.name} compiles an ONNX file: let exist_onnx_path be null or name a file")
        if self.request.onnx_path.stat().st_size == 0:
            raise CorruptModelError(f"{self.request.onnx_path}: is an empty file; export it again")
        return self.request.onnx_path

    def torch_model(self) -> nn.Module:
        """Return the PyTorch model to compile.

        Raises:
            RequestError: there is none.
        """
        if self.request.model is None:
            raise RequestError(f"{self.name} compiles the PyTorch model: no_validation has to be false")
        return self.request.model

    def engine_file(self) -> Path | None:
        """Return the compiled engine to load, or None when one has to be compiled.

        Raises:
            IncompatibleEngineError: there is no such file, or its fingerprint is of another chip or version.
        """
        path = self.request.engine_path
        if path is None:
            return None
        if not path.exists():
            raise IncompatibleEngineError(f"{path}: exist_compiler_path names no file")
        if beside(path).is_file():
            try:
                recorded = json.loads(beside(path).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise IncompatibleEngineError(f"{beside(path)}: is not JSON; compile the engine again") from error
            if not isinstance(recorded, dict):
                raise IncompatibleEngineError(f"{beside(path)}: is no fingerprint of an engine; compile it again")
            here = self.fingerprint()
            differing = [key for key in here if recorded.get(key) != here[key]]
            if differing:
                what = "; ".join(f"{key} {recorded.get(key)!r} there, {here[key]!r} here" for key in differing)
                raise IncompatibleEngineError(f"{path}: was built for something else ({what}); compile it again")
        return path

    def missing(self, package: str, error: BaseException) -> EngineMissingError:
        """Return the error for a package that cannot be imported."""
        return EngineMissingError(
            f"{self.name} is not available here: {package} cannot be imported ({error}); install it, or choose another"
        )

    def incompatible(self, path: Path, error: object) -> IncompatibleEngineError:
        """Return the error for an engine file that cannot be loaded."""
        reason = " ".join(str(error).split())[:300]
        return IncompatibleEngineError(
            f"{path}: not an engine that {self.name} can load on this chip and version; compile it again ({reason})"
        )


def beside(path: Path) -> Path:
    """Return where the fingerprint of an engine file stands."""
    return path.with_name(f"{path.name}.json")


def device_name(device: torch.device, device_type: str) -> str:
    """Return the name of an accelerator, of the CPU with its widest vector extension, or the mere type."""
    if device_type != device.type:
        return device_type
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))


def number_option(options: Mapping[str, EngineOption], name: str, default: int) -> int:
    """Return a whole number among an engine's options.

    Raises:
        RequestError: it is something else.
    """
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"engine_options.{name} must be a whole number, found {value!r}")
    return value


def text_options(options: Mapping[str, EngineOption], name: str) -> tuple[str, ...]:
    """Return an option that is one word or a list of words as a tuple; empty where it is not given."""
    value = options.get(name)
    if value is None:
        return ()
    return tuple(str(each) for each in value) if isinstance(value, tuple) else (str(value),)


def as_list(outputs: object) -> list[Tensor]:
    """Return a model's outputs, one tensor or a sequence of them, as a list.

    Raises:
        TypeError: there is something else among them.
    """
    found = [outputs] if isinstance(outputs, Tensor) else list(outputs) if isinstance(outputs, tuple | list) else None
    if found is None or not all(isinstance(each, Tensor) for each in found):
        raise TypeError(f"the model returns {type(outputs).__name__}, expected a tensor or a tuple of tensors")
    return [each for each in found if isinstance(each, Tensor)]
