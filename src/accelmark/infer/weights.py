"""Weights that a case keeps: a safetensors file with a record of where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from accelmark.spec.errors import DataError


def load_weights(model: nn.Module, path: Path) -> None:
    """Load ``path`` into ``model``; every parameter and buffer has to be in it.

    Raises:
        DataError: the file is missing, damaged, or of another model; what is missing or too much is named.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise DataError(f"{path}: reading it needs safetensors: pip install safetensors") from error
    if hasattr(model, "from_pretrained"):
        try:
            _load_transformers(model, path)
        except SafetensorError as error:
            raise DataError(f"{path}: is not a readable safetensors file: {error}") from error
        return
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: is not a readable safetensors file: {error}") from error
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise DataError(f"{path}: are weights of another model: {' '.join(str(error).split())[:300]}") from error
    if missing or unexpected:
        parts = [f"lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"has {', '.join(unexpected[:3])} besides"] if unexpected else []
        raise DataError(f"{path}: are weights of another model: {'; '.join(parts)}")


def _load_transformers(model: Any, path: Path) -> None:
    """Let transformers read its own format: it leaves tied weights out of files, and names some anew on the way."""
    try:
        loaded, told = type(model).from_pretrained(
            path.parent, config=model.config, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(f"{path}: are weights of another model: {' '.join(str(error).split())[:300]}") from error
    missing, unexpected = sorted(told["missing_keys"]), sorted(told["unexpected_keys"])
    if missing or told["mismatched_keys"]:
        lacking = ", ".join(map(str, [*missing, *told["mismatched_keys"]][:3]))
        besides = f"; has {', '.join(unexpected[:3])} besides" if unexpected else ""
        raise DataError(f"{path}: are weights of another model: lacks {lacking}{besides}")
    model.load_state_dict(loaded.state_dict())
