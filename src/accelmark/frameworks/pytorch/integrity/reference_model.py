"""Compare model and optimizer with those of the case, as the hooks left them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.frameworks.pytorch.integrity.equivalence import difference, outputs_of
from accelmark.frameworks.pytorch.model.attention import Autocast
from accelmark.frameworks.pytorch.model.blocks import has_foreign_forward
from accelmark.frameworks.pytorch.model.fp8 import FP8, Fp8Linear
from accelmark.frameworks.pytorch.model.identity import num_parameters, structure_hash, text_hash, weights_hash

_NUM_SHOWN: Final = 20
"""Largest number of replaced modules in the list; further ones are counted."""

_SHARDED: Final = "FSDP"
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_NUMBERS: Final = ("lr", "momentum", "nesterov", "weight_decay", "betas", "eps", "initial_lr")


@final
@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """The model as its case builds it, before hooks are called."""

    case: TrainCase
    parameter_hash: str
    num_parameters: int
    modules: Mapping[str, str]
    """Name of each module -> its class with its settings."""
    weights_hash: str | None
    """Of rank 0's weights; None on the other ranks."""
    is_changed: bool
    """Whether a vendor's code may change it: then weights and outputs are compared too."""
    outputs: Sequence[Tensor] | None
    """For synthetic samples, on rank 0 of a model that is not sharded."""

    @classmethod
    def of(cls, case: TrainCase, model: nn.Module, *, is_changed: bool) -> Self:
        """Describe the case's model."""
        is_first = case.place.rank == 0
        compares = is_changed and is_first and case.settings.parallelism != "fsdp2"
        return cls(
            case=case,
            parameter_hash=structure_hash(model),
            num_parameters=num_parameters(model),
            modules=_described(model),
            weights_hash=weights_hash(model) if is_first else None,
            is_changed=is_changed,
            outputs=outputs_of(case, model, torch.device("cpu")) if compares else None,
        )

    def compared(self, model: nn.Module) -> dict[str, Any]:
        """Return the fields of :class:`~accelmark.spec.events.Started` that compare ``model`` with this one.

        All ranks call it together, since the shards of a sharded model are gathered.
        """
        place, is_sharded = self.case.place, self.case.settings.parallelism == "fsdp2"
        trained = weights_hash(model) if self.is_changed and (place.rank == 0 or is_sharded) else None
        found = None if self.outputs is None else outputs_of(self.case, model, place.device)
        now = _described(model)
        names = sorted(name for name in {*self.modules, *now} if self.modules.get(name) != now.get(name))
        replaced = [f"{name or 'model'}: {self.modules.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]
        return {
            "parameter_hash": structure_hash(model),
            "standard_parameter_hash": self.parameter_hash,
            "standard_num_parameters": self.num_parameters,
            "module_hash": _module_hash(now),
            "standard_module_hash": _module_hash(self.modules),
            "replaced_modules": tuple(replaced[:_NUM_SHOWN]),
            "num_replaced_modules": len(replaced),
            "checkpoint_hash": self.weights_hash,
            "trained_checkpoint_hash": trained if place.rank == 0 else None,
            "output_difference": difference(self.outputs, found),
        }


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of data parallelism: modules with one child and no parameters of their own."""
    while True:
        inner = getattr(model, "module", None)
        only = [name for name, _ in model.named_children()] == ["module"] and not list(model.parameters(recurse=False))
        if not isinstance(inner, nn.Module) or not (only or isinstance(model, DistributedDataParallel)):
            return model
        model = inner


def optimizer_facts(optimizer: torch.optim.Optimizer, standard: torch.optim.Optimizer) -> tuple[str, tuple[str, ...]]:
    """Return the class of the standard optimizer, and the hyperparameters of ``optimizer`` that differ from it."""
    if optimizer is standard:
        return type(standard).__name__, ()
    changes = []
    for name in _NUMBERS:
        was, now = _values(standard, name), _values(optimizer, name)
        if was and was != now:
            changes.append(f"{name}: {_text(was)} -> {_text(now)}")
    if _count(standard) != _count(optimizer):
        changes.append(f"parameters updated: {_count(standard)} -> {_count(optimizer)}")
    return type(standard).__name__, tuple(changes)


def compute_type(model: nn.Module, autocast: Autocast, device: torch.device) -> str:
    """Return the types of the matrix work in a forward pass by their PyTorch names (``bfloat16``), joined by ``+``."""
    types = {FP8} if any(isinstance(module, Fp8Linear) for module in model.modules()) else set()
    with autocast():
        is_autocast = torch.is_autocast_enabled(device.type)
        types |= {torch.get_autocast_dtype(device.type)} if is_autocast else {each.dtype for each in model.parameters()}
    return "+".join(sorted(str(each).removeprefix("torch.") for each in types))


def module_hash(model: nn.Module) -> str:
    """SHA-256 over names, classes and settings of all modules, in order of their names."""
    return _module_hash(_described(model))


def _module_hash(described: Mapping[str, str]) -> str:
    return text_hash(f"{name} {what}\n" for name, what in sorted(described.items()))


def _described(model: nn.Module) -> dict[str, str]:
    """Describe each module by its class and settings (dropout rate, stride).

    Overridden forwards and forward hooks are included, except those of activation checkpointing and FSDP2.
    """
    return {name: _description(module) for name, module in model.named_modules()}


def _description(module: nn.Module) -> str:
    # FSDP2 gives each module that it shards its own class, with a prefix; the precision fp8 gives linear layers theirs.
    name = nn.Linear.__name__ if type(module) is Fp8Linear else type(module).__name__
    is_sharded = name.startswith(_SHARDED)
    shown = _ADDRESS.sub("", " ".join(module.extra_repr().split()))
    text = name.removeprefix(_SHARDED) + (f"({shown})" if shown else "")
    if has_foreign_forward(module):
        text += " with a forward of its own"
    num_hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return text if is_sharded or not num_hooks else f"{text} with {num_hooks} forward hooks"


def _values(optimizer: torch.optim.Optimizer, name: str) -> set[Any]:
    return {_hashable(group[name]) for group in optimizer.param_groups if name in group}


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return tuple(value) if isinstance(value, list) else value


def _text(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values))) or "none"


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
