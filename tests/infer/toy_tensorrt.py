"""A module with the part of TensorRT 10's public interface that the engine uses; ONNX Runtime computes.

CUDA graphs are played by recording the operators and copies of a call and executing them again, and streams by
nothing: addresses are those of memory on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import onnxruntime
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__version__ = "10.0.toy"
_NUMPY = {"tensor(float)": ("FLOAT", torch.float32), "tensor(int64)": ("INT64", torch.int64)}


TensorIOMode = Enum("TensorIOMode", "INPUT OUTPUT")
BuilderFlag = Enum("BuilderFlag", "TF32 FP16")
MemoryPoolType = Enum("MemoryPoolType", "WORKSPACE")


class Logger(int):
    WARNING = 1


class Context:
    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch = next(iter(self.shapes.values()))[0]
        return (batch, *self.engine.rows[name])

    def execute_async_v3(self, stream: int) -> bool:
        ToyEngine.enqueued.append((id(self), stream))

        def compute(shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
            feeds = {name: _memory(addresses[name], shape, torch.float32).numpy() for name, shape in shapes.items()}
            names = [each.name for each in self.engine.session.get_outputs()]
            for name, value in zip(names, self.engine.session.run(names, feeds), strict=True):
                _memory(addresses[name], value.shape, torch.float32).copy_(torch.from_numpy(value))

        given = dict(self.shapes), dict(self.addresses)
        if Graph.recording is not None:
            Graph.recording.steps.append(lambda: compute(*given))
        compute(*given)
        return True


class ToyEngine:
    """The engine of a plan, which is the ONNX file; its tensors are listed in reverse, outputs first."""

    enqueued: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, plan: bytes) -> None:
        self.session = onnxruntime.InferenceSession(plan, providers=["CPUExecutionProvider"])
        self.tensors = [*self.session.get_outputs(), *self.session.get_inputs()]
        self.num_io_tensors = len(self.tensors)
        self.rows = {each.name: tuple(each.shape[1:]) for each in self.tensors}
        self.device_memory_size_v2 = 2**20

    def get_tensor_name(self, index: int) -> str:
        return str(self.tensors[index].name)

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in {each.name for each in self.session.get_inputs()} else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")

    def create_execution_context(self) -> Context:
        return Context(self)


def Runtime(logger: Logger) -> Any:
    return SimpleNamespace(deserialize_cuda_engine=ToyEngine)


def Builder(logger: Logger) -> Any:
    def ignore(*_: Any) -> None:
        return

    names = ("clear_flag", "set_flag", "set_memory_pool_limit", "add_optimization_profile")
    return SimpleNamespace(
        create_network=lambda flags: SimpleNamespace(num_inputs=0, source=b""),
        create_builder_config=lambda: SimpleNamespace(**dict.fromkeys(names, ignore)),
        create_optimization_profile=lambda: SimpleNamespace(set_shape=ignore),
        build_serialized_network=lambda network, config: network.source,
    )


def OnnxParser(network: Any, logger: Logger) -> Any:
    def parse_from_file(path: str) -> bool:
        network.source = Path(path).read_bytes()
        names = [each.name for each in ToyEngine(network.source).session.get_inputs()]
        network.num_inputs = len(names)
        network.get_input = lambda index: SimpleNamespace(name=names[index])
        return True

    return SimpleNamespace(num_errors=0, parse_from_file=parse_from_file)


def _memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize * int(torch.Size(shape).numel())
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Graph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A CUDA graph, and the context in which it records."""

    recording: ClassVar[Graph | None] = None
    replays: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []

    def __enter__(self) -> Any:
        Graph.recording = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        Graph.recording = None
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "empty" not in str(func):
            self.steps.append(lambda: result.copy_(func(*args, **(kwargs or {}))))
        return result

    def replay(self) -> None:
        Graph.replays += 1
        for step in self.steps:
            step()


def play_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU play a device with streams and CUDA graphs."""
    numbers = iter(range(1, 100))

    def stream(*_: Any) -> Any:
        return SimpleNamespace(cuda_stream=next(numbers), wait_stream=lambda _: None, synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    monkeypatch.setattr("accelmark.infer.engine.GRAPH_DEVICE_TYPES", frozenset({"cpu"}))
    monkeypatch.setattr(ToyEngine, "enqueued", [])
    monkeypatch.setattr(Graph, "replays", 0)
