"""Whether a vendor's model still computes what the case's does, and which of PyTorch's own functions were replaced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn

from accelmark.train.feed import mover

if TYPE_CHECKING:
    from accelmark.train.case import TrainCase

FAR: Final = sys.float_info.max
"""The difference of what cannot be compared; infinity has no place in JSON."""
_TORCH: Final = Path(torch.__file__).parent
_SAMPLES: Final = 2
_SEED: Final = 1234
_WATCHED: Final[Mapping[str, Any]] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.autograd": torch.autograd,
}


@final
class Functions:
    """PyTorch's functions as they were before a vendor's code was loaded."""

    def __init__(self) -> None:
        self._before = dict(_functions())

    def replaced(self) -> tuple[str, ...]:
        """Return the functions that are others now, with where the new ones stand.

        PyTorch puts wrappers of its own around some of its functions when they are first used; those do not count.
        """
        now = dict(_functions())
        return tuple(
            f"{name} -> {_place(now[name])}"
            for name, function in sorted(self._before.items())
            if name in now and now[name] is not function and not _is_torchs_own(now[name])
        )


def _functions() -> Iterator[tuple[str, Any]]:
    for prefix, holder in _WATCHED.items():
        for name, value in list(vars(holder).items()):
            if callable(value) and not inspect.isclass(value) and not inspect.ismodule(value):
                yield f"{prefix}.{name}", value
    for name, value in list(vars(nn).items()):
        if inspect.isclass(value) and issubclass(value, nn.Module):
            yield f"torch.nn.{name}.forward", value.forward
            yield f"torch.nn.{name}.__call__", value.__call__
    for name, value in list(vars(torch.optim).items()):
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
            yield f"torch.optim.{name}.step", value.step


def _is_torchs_own(function: Any) -> bool:
    # Not unwrapped: a vendor's wrapper around PyTorch's function is the vendor's.
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_TORCH)


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{'/'.join(PurePath(code.co_filename).parts[-3:])}:{code.co_firstlineno}"


def outputs_of(case: TrainCase, model: nn.Module, device: torch.device) -> list[Tensor] | None:
    """Return what the model computes of made-up samples, in evaluation, in its parameters' own precision.

    The loss comes last, the model's floating-point outputs before it, all in double precision on the CPU. None where
    the model cannot compute so.
    """
    kept: list[Tensor] = []
    was_training = model.training
    handle = model.register_forward_hook(lambda _module, _inputs, output: kept.extend(_tensors(output)))
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(_SEED)
            batch = case.synthetic_batch(_SAMPLES)
            move = mover(device, channels_last=case.settings.channels_last)
            kept.append(case.loss(model, move(batch)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    finally:
        handle.remove()
        model.train(was_training)
    return [tensor.detach().cpu().double() for tensor in kept]


def difference(standard: Sequence[Tensor] | None, found: Sequence[Tensor] | None) -> float | None:
    """Return the largest relative difference (of Euclidean norms) between two lists of outputs.

    :data:`FAR` where they have other shapes, or are not finite; None where one of them is missing.
    """
    if standard is None or found is None:
        return None
    if [tensor.shape for tensor in standard] != [tensor.shape for tensor in found]:
        return FAR
    largest = 0.0
    for before, after in zip(standard, found, strict=True):
        norm = float(before.norm())
        apart = float((after - before).norm()) / norm if norm > 0 else float((after - before).norm())
        if apart != apart:
            return FAR
        largest = max(largest, apart)
    return largest


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
