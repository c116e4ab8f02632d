"""Choose and record the kernels of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Autocast = Callable[[], AbstractContextManager[Any]]

_ORDER: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


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


@final
@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a call that determine its kernel."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: torch.Size | None
    dropout: float
    is_causal: bool
    enable_gqa: bool


@final
class AttentionCalls(TorchFunctionMode):
    """Collects the calls of scaled dot-product attention, on any device, also the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[AttentionCall] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call if it is one of attention, and make it."""
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found.add(_call(*args, **options))
        return func(*args, **options)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    mask = None if attn_mask is None else attn_mask.shape
    return AttentionCall(query.shape, key.shape, value.shape, mask, dropout_p, is_causal, enable_gqa)


def chosen_kernels(calls: Iterable[AttentionCall], device: torch.device, forward: Autocast) -> tuple[str, ...]:
    """Return the kernels that PyTorch chooses on ``device`` for calls in a forward pass; empty where none is known."""
    names = set()
    for call in calls:
        with forward():
            is_autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if is_autocast else torch.float32
            sizes = (call.query, call.key, call.value)
            query, key, value = (torch.empty(size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
            mask = None if call.mask is None else torch.empty(call.mask, device=device, dtype=dtype)
            grouped = {"enable_gqa": True} if call.enable_gqa else {}
            try:
                number = torch._fused_sdp_choice(query, key, value, mask, call.dropout, call.is_causal, **grouped)
            except (RuntimeError, NotImplementedError):
                return ()
        names.add(SDPBackend(number).name.lower().removesuffix("_attention"))
    return tuple(sorted(names))
