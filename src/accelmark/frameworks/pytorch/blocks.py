"""Repeated blocks of a model: activation checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["off", "full", "selective"]

_aten = torch.ops.aten
_SAVED: Final = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operators whose outputs selective checkpointing keeps: they take most of the time of a block."""
_wrapped: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()
"""Block -> the forward set here, and whether the block had its own forward before."""


def wrap_blocks(blocks: Sequence[nn.Module], checkpointing: Checkpointing, compile_mode: str | None) -> None:
    """Set the forward of each block to one that is checkpointed, compiled, or both.

    ``torch.compile`` skips functions of ``torch.utils.checkpoint`` that are passed to it directly. With ``full``, the
    block's forward is therefore compiled first and then checkpointed. With ``selective``, a function around the
    checkpoint is compiled, so that the compiler applies the policy: the policy's dispatch mode would turn compiled
    code off.
    """
    for block in blocks:
        had_own = "forward" in vars(block)
        block.forward = _wrapped_forward(block.forward, checkpointing, compile_mode)
        _wrapped[block] = (block.forward, had_own)


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether the module has a forward that is neither its class's nor set by :func:`wrap_blocks`."""
    own = vars(module).get("forward")
    if own is None:
        return False
    forward, had_own = _wrapped.get(module, (None, True))
    return had_own or own is not forward


def _wrapped_forward(forward: Callable[..., Any], checkpointing: Checkpointing, mode: str | None) -> Callable[..., Any]:
    if checkpointing == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return recomputed if mode is None else torch.compile(recomputed, mode=mode)
    compiled = forward if mode is None else torch.compile(forward, mode=mode)
    return partial(checkpoint, compiled, use_reentrant=False) if checkpointing == "full" else compiled


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class CompileCounter:
    """Counts the graphs that ``torch.compile`` makes of this job's model, and the breaks between them."""

    def __init__(self) -> None:
        self._before = _counters()

    def read(self) -> tuple[int, int]:
        """Return graphs and graph breaks since the counter was made."""
        graphs, breaks = _counters()
        return graphs - self._before[0], breaks - self._before[1]


def _counters() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
