"""Count the operations and bytes of a training step without a GPU, and divide them by a chip's rates.

    python -m benchmarks.gpu.floors [--graphs] [CASE ...]

The model and its batch are fake tensors: shapes and types without data. A step is run forward and backward under
bf16 autocast, and every operator is counted. The floor of *operations* is the model's FLOPs over the dense peak. The
floor of *bytes* assumes perfect fusion: matrix kernels (products, convolutions, attention) read and write their
operands once; what lies between them is computed in one pass that reads what a matrix kernel wrote and writes what the
next one reads. Batch normalization reads its input twice, as its statistics need all of it. The *time* floor adds, for
each matrix kernel, the larger of its two floors, and the bytes of everything else. ``--graphs`` traces each case at its
reduced size as it is compiled, and prints the compiler's graphs and breaks.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from accelmark.frameworks.pytorch.backend import build_without_weights
from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.frameworks.pytorch.model.identity import num_parameters
from accelmark.spec.layers import flatten
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.plugins.catalog import find, load_case, load_vendor
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.case import case_class
from benchmarks.gpu.training import LLAMA_1B, LLAMA_3B

_COMPILED_BY_BLOCK: Final = ("llama2_7b", "llama3_1_8b", "flux")
"""Under FSDP2 blocks are compiled, else whole models."""
_MATRIX: Final = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "scaled_dot_product")
_PASSES: Final = {"native_batch_norm": 2, "_native_batch_norm_legit": 2, "native_batch_norm_backward": 2}
_OPTIMIZER_BYTES: Final = {"sgd": 20, "adam": 28, "adamw": 28, "lamb": 40}
"""Bytes of a parameter's update: weight, gradient and moments in fp32 are read, weight and moments written."""
_CLIP_BYTES: Final = 12
"""The norm reads a gradient; scaling reads and writes it."""
_CAST_BYTES: Final = 12
"""A weight is read in fp32 and written in bf16, its gradient the other way around."""
REACHABLE_TFLOPS: Final = 790.0
"""bf16 matrix product of 8,192 cubed that an H100 SXM reaches (780 to 800)."""


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """A case at the size and batch of its settings for one H100; ``shards`` devices share weights and optimizer."""

    case: str
    title: str
    settings: Mapping[str, Any]
    shards: int = 1
    measured_ms: float | None = None


WORKLOADS: Final = (
    Workload("resnet50", "ResNet-50, batch 256", {"batch_size": 256}, measured_ms=45.1),
    Workload("llama2_7b", "Llama 1.3B, batch 4", {**LLAMA_1B, "batch_size": 4}, measured_ms=164.2),
    Workload("llama2_7b", "Llama 1.3B, batch 16", {**LLAMA_1B, "batch_size": 16}),
    Workload("llama2_7b", "Llama 2.7B, batch 4", {**LLAMA_3B, "batch_size": 4}),
    Workload("llama3_1_8b", "Llama 3.1 8B, batch 1, 8 devices", {"batch_size": 1}, shards=8),
    Workload("bert", "BERT-large, batch 32", {"batch_size": 32}),
    Workload("vit", "ViT-B/16, batch 512", {"batch_size": 512}),
    Workload("gpt2", "GPT-2 medium, batch 16", {"batch_size": 16}),
    Workload("flux", "FLUX.1, batch 4, 8 devices", {"batch_size": 4}, shards=8),
    Workload("whisper_small", "Whisper small, batch 32", {"batch_size": 32}),
)


@final
@dataclass(slots=True)
class Floors:
    """Counts of one step; times follow from rates in FLOP/s and bytes/s."""

    parameters: int = 0
    update_bytes: float = 0.0
    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the matrix kernels, by operator."""
    matrix: list[tuple[str, float, float]] = field(default_factory=list)
    """Operator, FLOPs and bytes of each matrix kernel."""
    between_bytes: float = 0.0
    """Of everything between matrix kernels, perfectly fused."""
    eager_bytes: float = 0.0
    """Of every operator by itself."""
    num_operators: int = 0

    def operations_ms(self, rate: float) -> float:
        """Return the floor of operations."""
        return 1e3 * sum(self.flops.values()) / rate

    def bytes_ms(self, bandwidth: float) -> float:
        """Return the floor of bytes."""
        kernels = sum(size for _, _, size in self.matrix)
        return 1e3 * (kernels + self.between_bytes + self.update_bytes) / bandwidth

    def parts_ms(self, rate: float, bandwidth: float) -> dict[str, float]:
        """Return the time floor by part: each kind of matrix kernel, what is between them, and the update."""
        parts: dict[str, float] = defaultdict(float)
        for name, flops, size in self.matrix:
            parts[name] += 1e3 * max(flops / rate, size / bandwidth)
        return {**parts, "between": 1e3 * self.between_bytes / bandwidth, "update": 1e3 * self.update_bytes / bandwidth}


@final
class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and bytes of every operator, and which tensors pass from matrix kernels to others."""

    def __init__(self, floors: Floors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._floors = floors
        self._written: dict[int, str] = {}
        """Storage -> the kind of operator that wrote it; what was never written is an input or a weight."""
        self._read: set[int] = set()
        self._alive: list[Any] = []
        """Storages, so that no identity is used twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator, and run it."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        inputs = {_key(each) for each in given}
        if func.is_view or not made or ({_key(each) for each in made} <= inputs and not func._schema.is_mutable):
            return out
        floors, size = self._floors, sum(map(_bytes, (*given, *made)))
        floors.num_operators += 1
        floors.eager_bytes += size
        kind = next((part for part in _MATRIX if name == part or (part[:6] == "scaled" and part in name)), None)
        for each in given:
            key = _key(each)
            if kind is not None and self._written.get(key) == "between":
                floors.between_bytes += _bytes(each)  # written for the kernel
            elif kind is None and self._written.get(key, "matrix") != "between" and key not in self._read:
                self._read.add(key)
                floors.between_bytes += _bytes(each) * _PASSES.get(name, 1)
        for each in made:
            self._alive.append(each.untyped_storage())
            self._written[_key(each)] = "between" if kind is None else "matrix"
        if kind is not None:
            count = self._flops(func, name, args, kwargs or {}, out)
            floors.matrix.append((kind, count, size))
            floors.flops[kind] += count
        return out

    @staticmethod
    def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
        if "scaled_dot_product" in name:  # the products of the forward pass; twice as many in the backward pass
            query, key, *_ = args[1:] if "backward" in name else args
            products: float = 4.0 * query.shape[:-1].numel() * key.shape[-2] * query.shape[-1]
            return products * (2 if "backward" in name else 1)
        if name == "convolution_backward":
            forward = conv_flop_count(args[1].shape, args[2].shape, args[0].shape, args[7])
            return float(forward) * sum(map(bool, args[10][:2]))
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))


@final
class FusedAttention(TorchFunctionMode):
    """Computes every attention by one fused kernel; dropout, which it does inside, is left out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a call of attention; make all others."""
        given = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        query, key, value = args[:3] if len(args) > 2 else (given["query"], given["key"], given["value"])
        mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        half = (each.to(torch.bfloat16) for each in (query, key, value))
        return kernel(*half, 0.0, bool(given.get("is_causal")), attn_mask=mask)[0]


def faked(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of the model over fake tensors of the CPU."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = FakeTensor(mode, parameter.detach().to("meta"), torch.device("cpu"))
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = FakeTensor(mode, buffer.to("meta"), torch.device("cpu"))
    duplicate: nn.Module = copy.deepcopy(model, memo)
    return duplicate


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def opened(workload: Workload, settings: Mapping[str, Any]) -> TrainCase:
    """Return the case of a workload with these changes, on one CPU and synthetic data."""
    spec = load_case(workload.case)
    assert spec.train is not None
    values: dict[str, Any] = copy.deepcopy(dict(spec.train.settings))
    for name, value in {**settings, "loader.synthetic": True, "parallelism": "ddp"}.items():
        *groups, last = name.split(".")
        table = values
        for group in groups:
            table = table.setdefault(group, {})
        table[last] = value
    make: Any = case_class(find("cases", workload.case).ref("train"), "pytorch", TrainCase)
    return cast("TrainCase", make(TrainSettings.model_validate(values), {}, Place(0, 1, 1, torch.device("cpu"), 1)))


def graphs(workload: Workload) -> str:
    """Return the compiled graphs, their operators and the reasons of breaks of a case at its reduced size."""
    spec = load_case(workload.case)
    assert spec.train is not None
    case = opened(workload, {**flatten(spec.train.reduced), "batch_size": 4, "model.from_checkpoint": False})
    model = case.build_model().train()
    blocks = case.checkpointed_blocks(model) if workload.case in _COMPILED_BY_BLOCK else []
    num_operators: list[int] = []

    def backend(graph: torch.fx.GraphModule, _example: Any) -> Any:
        num_operators.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    counters.clear()
    for module in blocks or [model]:
        module.compile(backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.loss(model, case.synthetic_batch(4))
    torch.autograd.backward(loss)
    breaks = "; ".join(f"{reason.splitlines()[0]} ({number})" for reason, number in counters["graph_break"].items())
    unit = f"each of {len(blocks)} blocks" if blocks else "whole model"
    return f"| {workload.case} | {unit} | {len(num_operators)} | {sum(num_operators)} | {breaks or 'none'} |"


def count(workload: Workload) -> Floors:
    """Return the counts of a step of a workload on one device."""
    case = opened(workload, workload.settings)
    settings = case.settings
    floors = Floors()
    model = build_without_weights(case, PerfLogWriter(0)).train()
    floors.parameters = num_parameters(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = {name: mode.from_tensor(each) for name, each in case.synthetic_batch(settings.batch_size).items()}
    with mode:
        model = faked(model, mode)
        with Counter(floors), FusedAttention():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = case.loss(model, batch)
            torch.autograd.backward(loss)
    clip = _CLIP_BYTES if settings.gradient_clip_norm else 0
    per_parameter = (_OPTIMIZER_BYTES[settings.optimizer.name] + clip) / workload.shards + _CAST_BYTES
    floors.update_bytes = float(floors.parameters * per_parameter)
    return floors


_PARTS: Final = {
    "Products": ("mm", "addmm", "bmm", "baddbmm"),
    "Convolutions": ("convolution", "convolution_backward"),
    "Attention": ("scaled_dot_product",),
    "Between": ("between",),
    "Update": ("update",),
}


def main(names: list[str]) -> None:
    """Print the floors of all workloads, or those of the named cases, as two tables in Markdown."""
    chip = next(each for each in load_vendor("nvidia").chips if each.name == "H100" and each.variant == "SXM")
    peak, bandwidth = (chip.peaks.bf16 or 0.0) * 1e12, (chip.memory_bandwidth_gb_s or 0.0) * 1e9
    reachable = REACHABLE_TFLOPS * 1e12
    chosen = [each for each in WORKLOADS if not names or each.case in names]
    if "--graphs" in names:
        chosen = list({each.case: each for each in WORKLOADS if names == ["--graphs"] or each.case in names}.values())
        print("| Case | Compiled | Graphs | Operators | Breaks |\n|---|---|---:|---:|---|")
        print("\n".join(map(graphs, chosen)))
        return
    columns = (
        "Parameters",
        "TFLOP",
        "GB, fused",
        "GB, eager",
        "Operations",
        "Bytes",
        "Time",
        "At 790 TFLOP/s",
        "Measured",
    )
    rows, parts = [("Workload", *columns)], [("Workload", *_PARTS)]
    for workload in chosen:
        floors = count(workload)
        by_part = floors.parts_ms(reachable, bandwidth)
        time_ms, took_ms = sum(by_part.values()), workload.measured_ms
        cells = (
            f"{floors.parameters / 1e6:,.0f} M",
            f"{sum(floors.flops.values()) / 1e12:.1f}",
            f"{floors.bytes_ms(bandwidth) * bandwidth / 1e12:.1f}",
            f"{floors.eager_bytes / 1e9:.1f}",
            f"{floors.operations_ms(peak):.1f} ms",
            f"{floors.bytes_ms(bandwidth):.1f} ms",
            f"{sum(floors.parts_ms(peak, bandwidth).values()):.1f} ms",
            f"{time_ms:.1f} ms",
            "-" if took_ms is None else f"{took_ms:g} ms, {took_ms / time_ms:.2f} x",
        )
        rows.append((workload.title, *cells))
        sums = (sum(by_part.get(kind, 0.0) for kind in kinds) for kinds in _PARTS.values())
        parts.append((workload.title, *(f"{part_ms:.1f} ms" for part_ms in sums)))
    for table in (rows, parts):
        head, *body = (f"| {' | '.join(row)} |" for row in table)
        print("\n".join([head, f"|---|{'---:|' * (len(table[0]) - 1)}", *body, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
