"""Dividing a model into the stages of a pipeline: each rank keeps the modules of its own."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts
from accelmark.spec.errors import RequestError


@final
class Elsewhere(nn.Module):
    """In the place of a module of another stage: returns its first argument."""

    def forward(self, given: Tensor, *_args: Any, **_options: Any) -> Tensor:
        """Return ``given``."""
        return given


@final
class Received(nn.Module):
    """In the place of the embedding: returns what was received from the stage before."""

    hidden: Tensor

    def forward(self, *_args: Any) -> Tensor:
        """Return the hidden states, of shape (samples, length, width)."""
        return self.hidden


def keep_stage(model: nn.Module, parts: PipelineParts | None, stage: int, num_stages: int) -> None:
    """Remove the modules of other stages from ``model``, in place; all others keep their names.

    Args:
        model: the whole model.
        parts: its modules; the blocks are divided evenly.
        stage: from 0.
        num_stages: of the pipeline.

    Raises:
        RequestError: the model cannot be divided in this way.
    """
    if parts is None:
        raise RequestError(f"parallelism: pp cannot divide {type(model).__name__}: its case states no pipeline_parts()")
    blocks = model.get_submodule(parts.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) % num_stages:
        raise RequestError(f"parallelism: pp={num_stages} does not divide the {_count(blocks)} blocks of the model")
    ends = [model.get_submodule(name) for name in (parts.first, *parts.last)]
    divided = [*blocks, *ends]
    if any(True for module in divided for _ in module.buffers()):
        raise RequestError("parallelism: pp cannot divide a model whose blocks or ends have buffers")
    owners: dict[int, nn.Module] = {}
    for module in divided:
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), module) is not module:
                what = f"{type(module).__name__}.{name} is shared with another module, as tied embeddings are"
                raise RequestError(f"parallelism: pp cannot divide the model: {what}; use fsdp or tp")
    size = len(blocks) // num_stages
    for number in range(len(blocks)):
        if number // size != stage:
            blocks[number] = Elsewhere()
    if stage > 0:
        model.set_submodule(parts.first, Received())
    if stage < num_stages - 1:
        for name in parts.last:
            model.set_submodule(name, Elsewhere())


def _count(blocks: nn.Module) -> int:
    return len(list(blocks.children()))
