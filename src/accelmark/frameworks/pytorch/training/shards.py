"""The tensors of a sharded model and its optimizer on disk, by PyTorch's distributed checkpoints (DCP) as safetensors.

Each rank writes its shards with their offsets, so that ranks of any other mesh read the parts that they need. No file
is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

_MODEL: Final = "model."
_STATE: Final = "optimizer."


def write_shards(directory: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Write all tensors of at least one dimension, and return the rest, which is the same on every rank.

    Args:
        directory: a new directory that all ranks see.
        model: its state.
        optimizer: its state, with the numbers of parameters as keys.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {f"{_STATE}{n}.{name}": each for n, values in optimizer["state"].items() for name, each in values.items()}
    state |= {f"{_MODEL}{name}": each for name, each in model.items()}
    shards = {name: each.contiguous() for name, each in state.items() if isinstance(each, Tensor) and each.ndim}
    save(shards, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))
    rest = {name: each for name, each in state.items() if name not in shards}
    return {"param_groups": optimizer["param_groups"], **rest}


def read_model(directory: Path, model: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Fill the tensors of ``model``, which may be sharded in another way."""
    with torch.no_grad():
        for name, each in model.items():
            if not each.ndim:
                each.copy_(rest[f"{_MODEL}{name}"])
    _read(directory, {f"{_MODEL}{name}": each.detach() for name, each in model.items() if each.ndim})


def read_optimizer(directory: Path, parameters: list[Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of an optimizer over ``parameters``, sharded as they are."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    saved: Any = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    found: dict[str, Any] = {name: each for name, each in rest.items() if name.startswith(_STATE)}
    tensors = {
        name: torch.empty_like(parameters[int(name.split(".")[1])], dtype=saved[name].properties.dtype).detach()
        for name in saved
        if name.startswith(_STATE)
    }
    _read(directory, tensors)
    state: dict[int, dict[str, Any]] = {}
    for name, each in {**found, **tensors}.items():
        _, number, own = name.split(".", 2)
        state.setdefault(int(number), {})[own] = each
    return {"state": state, "param_groups": rest["param_groups"]}


def _read(directory: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=not dist.is_initialized())
