"""Activation checkpointing and compilation, of a model's repeated blocks or of all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.log.events import Compiled, Event
from accelmark.spec.log.perflog import EventLog

Checkpointing = Literal["off", "full", "selective"]

_SAVED: Final = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operators whose outputs selective checkpointing keeps: they take most of the time of a block."""


def wrap_blocks(blocks: Sequence[nn.Module], checkpointing: Checkpointing, mode: str | None) -> None:
    """Replace the forward of each block by a checkpointed or compiled forward, or both.

    ``torch.compile`` skips functions of ``torch.utils.checkpoint`` that are passed to it directly. With ``selective``,
    a function around the checkpoint is compiled, since the policy's dispatch mode would turn compiled code off.
    """

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward if mode is None else torch.compile(forward, mode=mode)

    for block in blocks:
        if checkpointing == "selective":
            block.forward = compiled(_selectively_checkpointed(block.forward))
        elif checkpointing == "full":
            block.forward = partial(checkpoint, compiled(block.forward), use_reentrant=False)
        else:
            block.forward = compiled(block.forward)


def _selectively_checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  # PyTorch 2.5

    saved = {getattr(torch.ops.aten, name).default for name in _SAVED if hasattr(torch.ops.aten, name)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


class Compilation:
    """The compilation of a job's model: counts its graphs, and the breaks between them."""

    def __init__(self) -> None:
        self._before = self._counters()

    @staticmethod
    def _counters() -> tuple[int, int]:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def report(self, mode: str, log: EventLog) -> None:
        """Log graphs and graph breaks since the start; warn where nothing was compiled although it was requested."""
        (graphs, breaks), (graphs_before, breaks_before) = self._counters(), self._before
        log.event(Event.COMPILED, Compiled(graphs=graphs - graphs_before, graph_breaks=breaks - breaks_before))
        if graphs == graphs_before:
            log.event(Event.WARNING, {"message": f"compile: {mode}: nothing of the model was compiled"})


def wrap_model(case: TrainCase, model: nn.Module, name: str, log: EventLog) -> Compilation | None:
    """Apply activation checkpointing and compilation in place, before any data-parallel wrapper.

    Blocks are compiled where activations are checkpointed or FSDP2 shards block by block, else the whole model; nothing
    is, with a warning, where this host cannot compile.

    Raises RequestError: blocks are to be checkpointed, and the case ``name`` has none.
    """
    settings = case.settings
    checkpointing, mode = settings.activation_checkpointing, settings.compile
    compilation = None
    if mode != "off":
        try:  # the compiler that is initialised for this small function is used for the model too
            torch.compile(torch.sin)(torch.ones(8, device=case.place.device))
            compilation = Compilation()
        except Exception as error:  # noqa: BLE001 - whatever a host's compiler lacks
            message = f"compile: {mode}: this host cannot compile, so the model is trained without compilation "
            log.event(Event.WARNING, {"message": f"{message}({type(error).__name__}: {first_line(error)})"})
    compiled = None if compilation is None else mode
    blocks = case.checkpointed_blocks(model)
    if checkpointing != "off" and not blocks:
        raise RequestError(f"activation_checkpointing: case {name!r} has no repeated blocks for it; leave it off")
    if checkpointing != "off" or (compiled is not None and blocks and settings.is_sharded):
        wrap_blocks(blocks, checkpointing, compiled)
    elif compiled is not None:
        model.compile(mode=compiled)
    return compilation
