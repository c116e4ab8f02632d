"""Hashes of a model's structure and initial weights, its counted FLOPs, and its types and kernels of attention."""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from accelmark.frameworks.pytorch.batches import on_meta
from accelmark.frameworks.pytorch.model.linear import FP8, Fp8Linear

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import Batch, TrainCase

Autocast = Callable[[], AbstractContextManager[Any]]

_ORDER: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_COUNTED_SAMPLES = 2
"""Batch size for counting operations; batch normalisation cannot train on a single sample."""
_MOST_REAL_PARAMETERS: Final = 100_000_000
"""Limit for counting on real tensors, which takes minutes and hundreds of GB of host memory for larger models."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_COUNTING: Final = threading.Lock()
"""The choice of attention kernels is a setting of the process: two threads would restore each other's."""
_NOT_COUNTED: Final = (RuntimeError, NotImplementedError, TypeError, ValueError)


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters, counting shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def structure_hash(model: nn.Module) -> str:
    """SHA-256 over names, shapes and types of all parameters, in order of their names."""
    named = sorted(model.named_parameters())
    lines = "".join(f"{name} {tuple(param.shape)} {param.dtype}\n" for name, param in named)
    return hashlib.sha256(lines.encode()).hexdigest()


def module_hash(model: nn.Module) -> str:
    """SHA-256 over names, classes and settings (dropout rate, stride) of all modules, in order of their names."""
    shown = (
        (name, type(module).__name__, _ADDRESS.sub("", " ".join(module.extra_repr().split())))
        for name, module in sorted(model.named_modules())
    )
    lines = "".join(f"{name} {kind}({settings})\n" for name, kind, settings in shown)
    return hashlib.sha256(lines.encode()).hexdigest()


def compute_type(model: nn.Module, autocast: Autocast, device: torch.device) -> str:
    """Return the types of the matrix work in a forward pass by their PyTorch names (``bfloat16``), joined by ``+``."""
    types = {FP8} if any(isinstance(module, Fp8Linear) for module in model.modules()) else set()
    with autocast():
        is_autocast = torch.is_autocast_enabled(device.type)
        types |= {torch.get_autocast_dtype(device.type)} if is_autocast else {each.dtype for each in model.parameters()}
    return "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over each parameter's name and value, in order of their names; all ranks gather sharded ones together."""
    named = sorted(model.named_parameters())
    if any(hasattr(parameter, "full_tensor") for _, parameter in named):
        return hashlib.sha256(b"".join(_tensor_digest(name, whole(tensor)) for name, tensor in named)).hexdigest()
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        digests = pool.map(lambda item: _tensor_digest(item[0], item[1].detach()), named)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter, detached; a sharded one is gathered by all ranks together."""
    gather: Callable[[], Tensor] | None = getattr(parameter, "full_tensor", None)
    return parameter.detach() if gather is None else gather().detach()


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(flat.numpy().data)
    return digest.digest()


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model without data: the same modules over tensors on the meta device."""
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    duplicate: nn.Module = copy.deepcopy(model, memo)
    return duplicate


def materialize(model: nn.Module, device: torch.device) -> None:
    """Move a model of the meta device to ``device`` without values; parameters that layers share stay shared."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            shared[name] = first[id(parameter)]
    model.to_empty(device=device)
    for name, source in shared.items():
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, model.get_parameter(source))


def count_flops(case: TrainCase, model: nn.Module) -> tuple[float | None, str | None]:
    """Return forward and backward FLOPs of one sample (a multiply-add is two), or None and why they were not counted.

    ``FlopCounterMode`` counts them on a copy on the meta device, without computing. A model that reads tensor values
    is run on real tensors instead, if it has at most ``_MOST_REAL_PARAMETERS``.
    """
    with torch.random.fork_rng(devices=[]):
        batch = case.synthetic_batch(_COUNTED_SAMPLES)
        try:
            return _flops(case, meta_copy(model), on_meta(batch)), None
        except _NOT_COUNTED as error:
            reason = f"the model does not run on the meta device ({type(error).__name__}: {error})"
        size = num_parameters(model)
        if size > _MOST_REAL_PARAMETERS or any(parameter.is_meta for parameter in model.parameters()):
            limit = f"on real tensors only models of at most {_MOST_REAL_PARAMETERS:.0e} parameters are counted"
            return None, f"{reason}; {limit}, this one has {size:,}"
        try:
            return _flops(case, copy.deepcopy(model), batch), None
        except _NOT_COUNTED as error:
            return None, f"{reason}; counting on real tensors failed ({type(error).__name__}: {error})"


def _flops(case: TrainCase, model: nn.Module, batch: Batch) -> float:
    model.train()
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _conv_backward_flops})
    # The counter supports fused attention on some devices only, its separate operations on all.
    with _COUNTING, sdpa_kernel(SDPBackend.MATH), counter:
        torch.autograd.backward(case.loss(model, batch))
    return float(counter.get_total_flops()) / _COUNTED_SAMPLES


def _conv_backward_flops(grad: Any, inputs: Any, weight: Any, *options: Any, out_shape: Any) -> int:
    """Return the FLOPs of a convolution's gradients; PyTorch's own formula counts a grouped one as if ungrouped."""
    _bias, _stride, _padding, _dilation, is_transposed, _output_padding, _groups, output_mask = options
    forward: int = conv_flop_count(inputs, weight, grad, is_transposed)
    return forward * sum(map(bool, output_mask[:2]))


def with_attention(autocast: Autocast, first: str) -> Autocast:
    """Return a context in which the forward pass tries the kernel ``first`` before the others."""
    if first == "auto":
        return autocast
    if first == "math":
        order = [SDPBackend.MATH]
    else:
        order = [_ORDER[first], *(backend for name, backend in _ORDER.items() if name != first)]

    @contextmanager
    def context() -> Iterator[None]:
        with sdpa_kernel(order, set_priority=True), autocast():
            yield

    return context


class AttentionCall(NamedTuple):
    """Arguments of a call of scaled dot-product attention, with shapes in place of tensors."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    attn_mask: torch.Size | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class AttentionCalls(TorchFunctionMode):
    """Collects the calls of scaled dot-product attention, on any device, also the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[AttentionCall] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call if it is one of attention, and make it."""
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            shapes, named = tree_map_only(Tensor, lambda tensor: tensor.shape, (args, options))
            self.found.add(AttentionCall(*shapes, **named))
        return func(*args, **options)


def chosen_kernels(calls: Iterable[AttentionCall], device: torch.device, forward: Autocast) -> tuple[str, ...]:
    """Return the kernels that PyTorch chooses on ``device`` for calls in a forward pass; empty where none is known."""
    names = set()
    for call in calls:
        with forward():
            is_autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if is_autocast else torch.float32
            sizes = (call.query, call.key, call.value)
            query, key, value = (torch.empty(size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
            mask = None if call.attn_mask is None else torch.empty(call.attn_mask, device=device, dtype=dtype)
            grouped = {"enable_gqa": True} if call.enable_gqa else {}
            try:
                number = torch._fused_sdp_choice(query, key, value, mask, call.dropout_p, call.is_causal, **grouped)
            except (RuntimeError, NotImplementedError):
                return ()
        names.add(SDPBackend(number).name.lower().removesuffix("_attention"))
    return tuple(sorted(names))
