"""The tensors of a sharded model and its optimizer on disk, by PyTorch's distributed checkpoints (DCP) as safetensors.

Each rank writes its shards with their offsets, so that ranks of any other mesh read the parts that they need. No file
is a pickle. Importing this module takes most of a second.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accelmark.spec.backports import zip_strict

_MODEL: Final = "model."
_STATE: Final = "optimizer."
_SCALAR: Final = "scalar."


def write_shards(
    directory: Path, state: Mapping[str, Any], names: Sequence[str], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Write all tensors of the states of ``model`` and ``optimizer``, and return the rest, the same on every rank.

    ``names`` are of the parameters that are numbered in the optimizer's state; ``group`` has the ranks that share the
    directory, None: all. Raises RuntimeError: a rank could not write.
    """
    optimizer = state["optimizer"]
    values = ((names[number], own) for number, own in optimizer["state"].items())
    written = {f"{_STATE}{own}.{name}": value for name, found in values for own, value in found.items()}
    written |= {f"{_MODEL}{name}": tensor for name, tensor in state["model"].items()}
    tensors = {name: each for name, each in written.items() if isinstance(each, Tensor)}
    shards = dict(_writable(name, each) for name, each in tensors.items())
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        has_all_ranks = group is None or group.size() == dist.get_world_size()
        save(shards, storage_writer=writer, process_group=group, planner=None if has_all_ranks else _PartPlanner())
    except CheckpointException as error:
        raise _cause(error) from error
    rest = {name: each for name, each in written.items() if name not in tensors}
    return {"param_groups": optimizer["param_groups"], **rest}


class _PartPlanner(DefaultSavePlanner):
    """Plans without the check that tensors are complete: a directory of one host has the shards of its ranks only."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the writes of each rank, and the places of the parts of tensors."""
        self.global_plan, self.metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        return self.global_plan, self.metadata


def _writable(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return name and value as they are written: a tensor of no dimension, as a count of steps, as one of one."""
    return (name, tensor.contiguous()) if tensor.ndim else (f"{_SCALAR}{name}", tensor.reshape(1))


def read_model(directory: Path, model: Mapping[str, Tensor]) -> None:
    """Fill the tensors of ``model``, which may be sharded in another way. Raises RuntimeError: a part is missing."""
    _read(directory, dict(_writable(f"{_MODEL}{name}", tensor.detach()) for name, tensor in model.items()))


def read_optimizer(
    directory: Path, parameters: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the saved state of an optimizer over ``parameters`` by their numbers, sharded as they are."""
    saved: Any = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    numbers = {name: number for number, name in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for key in (*rest, *saved):
        is_scalar, full = key.startswith(_SCALAR), key.removeprefix(_SCALAR)
        parameter, _, name = full.removeprefix(_STATE).partition(".")
        if not full.startswith(_STATE) or name not in numbers:
            continue
        values = state.setdefault(numbers[name], {})
        if key in rest:
            values[parameter] = rest[key]
        else:
            dtype = saved[key].properties.dtype
            tensors[key] = torch.empty(1, dtype=dtype) if is_scalar else torch.empty_like(parameters[name], dtype=dtype)
            values[parameter] = tensors[key].reshape(()) if is_scalar else tensors[key].detach()
    _read(directory, {name: tensor.detach() for name, tensor in tensors.items()})
    return state


def _read(directory: Path, tensors: dict[str, Tensor]) -> None:
    # Without an exchange between ranks: each reads its parts from the files that it sees.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(tensors, storage_reader=_Reader(directory, tensors), no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from error


def _cause(error: CheckpointException) -> RuntimeError:
    """Return the first rank's error as an ``Exception``, which callers catch: DCP's error is not."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}")


class _Reader(HuggingFaceStorageReader):
    """Reads the parts of each tensor; checks that all parts of this rank are in a directory that hosts do not share."""

    def __init__(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(directory))
        self._tensors = tensors

    def read_metadata(self) -> Metadata:
        """Return the places of the parts of tensors, with the sizes of the whole tensors."""
        metadata = super().read_metadata()
        entries: dict[str, Any] = metadata.state_dict_metadata
        for name, tensor in self._tensors.items():
            # A saved tensor that is larger keeps its size: load() refuses it.
            if name in entries and all(part <= whole for part, whole in zip_strict(entries[name].size, tensor.size())):
                entries[name].size = tensor.size()
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan. Raises ValueError: a part of a tensor is not in the directory."""
        num_read: Counter[str] = Counter()
        for item in plan.items:
            num_read[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self._tensors.items():
            part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if num_read[name] != part.numel():
                raise ValueError(
                    f"{name} is not complete: it has another shape, or hosts that share no directory wrote it, "
                    "which can go on only with the same ranks and parallelism"
                )
        prepared: LoadPlan = super().prepare_local_plan(plan)
        return prepared
