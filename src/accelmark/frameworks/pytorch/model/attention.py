"""Which kernel computes scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from torch.nn.attention import SDPBackend, sdpa_kernel

Autocast = Callable[[], AbstractContextManager[Any]]
"""Returns the context manager of a forward pass."""

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
