"""Weights in files of PyTorch, which preparations convert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from accelmark.spec.errors import DataError


def read_weights(path: Path) -> dict[str, Any]:
    """Return what a file of PyTorch has by name, without running code in it; raises DataError where it is damaged."""
    import torch

    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError) as error:
        raise DataError(f"{path}: PyTorch cannot read it as weights alone; download it again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: does not consist of names with tensors")
    return found


def check_weights(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], title: str) -> None:
    """Raise DataError where names or shapes of weights are not those of a model."""
    if others := sorted(expected.keys() ^ found.keys()):
        problem = f"{others[0]} is {'missing' if others[0] in expected else 'unknown'}"
        raise DataError(f"{path}: {len(others)} names differ from {title}: {problem}")
    for name, value in expected.items():
        if (shape := tuple(getattr(found[name], "shape", ()))) != tuple(value.shape):
            raise DataError(f"{path}: {name} has shape {shape}; expected {tuple(value.shape)}")
