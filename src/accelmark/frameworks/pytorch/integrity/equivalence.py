"""Compare the outputs of a vendor's model with those of the case's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.data.feed import mover

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import TrainCase

FAR: Final = sys.float_info.max
"""The difference of outputs that cannot be compared; JSON has no infinity."""
_SAMPLES: Final = 2
_SEED: Final = 1234


def outputs_of(case: TrainCase, model: nn.Module, device: torch.device) -> list[Tensor] | None:
    """Return the model's outputs for synthetic samples, in evaluation mode and its parameters' precision.

    The loss comes last, the model's floating-point outputs before it, all in double precision on the CPU. None where
    that fails.
    """
    kept: list[Tensor] = []
    was_training = model.training
    handle = model.register_forward_hook(
        lambda _module, _inputs, output: kept.extend(one for one in tensors_in(output) if one.is_floating_point())
    )
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


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yield the tensors in the inputs or outputs of a model: a tensor, or sequences and mappings of them."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from tensors_in(value)
    elif isinstance(given, tuple | list):
        for value in given:
            yield from tensors_in(value)
