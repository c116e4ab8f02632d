"""Weights of ResNet-50-vd from the file that RT-DETR's authors publish, under the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

ARCHIVE: Final = "ResNet50_vd_ssld_v2_pretrained_from_paddle.pth"
_COUNTER: Final = ".num_batches_tracked"
"""Of steps, which frozen normalization does not have."""
_NAMES: Final = {
    r"^conv1\.conv1_1\.": "embedder.embedder.0.",
    r"^conv1\.conv1_2\.": "embedder.embedder.1.",
    r"^conv1\.conv1_3\.": "embedder.embedder.2.",
    r"^res_layers\.": "encoder.stages.",
    r"\.blocks\.": ".layers.",
    r"\.branch2a\.": ".layer.0.",
    r"\.branch2b\.": ".layer.1.",
    r"\.branch2c\.": ".layer.2.",
    r"\.short\.conv\.(conv|norm)\.": r".shortcut.1.\1.",
    r"\.short\.": ".shortcut.",
    r"\.conv\.": ".convolution.",
    r"\.norm\.": ".normalization.",
}
"""Parts of the authors' names -> those of transformers, replaced in this order."""


def _renamed(name: str) -> str:
    for part, other in _NAMES.items():
        name = re.sub(part, other, name)
    return name


def _write(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``."""
    import torch
    from safetensors.torch import save_file
    from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

    path, config = archives.paths[ARCHIVE], RTDetrResNetConfig()
    with torch.device("meta"):
        expected = RTDetrResNetBackbone(config).state_dict()
    weights = _read(path)
    _check({name: value for name, value in expected.items() if not name.endswith(_COUNTER)}, weights, path)
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _read(path: Path) -> dict[str, Any]:
    """Return the tensors of a file under their new names; no code in it is run."""
    import torch

    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        named = {_renamed(name): value.contiguous() for name, value in state.items() if not name.endswith(_COUNTER)}
    except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError) as error:
        raise DataError(f"{path}: PyTorch cannot read it as weights alone; download it again") from error
    except (AttributeError, TypeError) as error:
        raise DataError(f"{path}: does not consist of names with tensors") from error
    return named


def _check(expected: Mapping[str, Any], actual: Mapping[str, Any], path: Path) -> None:
    if others := sorted(expected.keys() ^ actual.keys()):
        problem = f"{others[0]} is {'missing' if others[0] in expected else 'unknown'}"
        raise DataError(f"{path}: {len(others)} names differ from ResNet-50-vd's weights: {problem}")
    for name, value in expected.items():
        if actual[name].shape != value.shape:
            shapes = f"{tuple(actual[name].shape)}; expected {tuple(value.shape)}"
            raise DataError(f"{path}: {name} has shape {shapes}")


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, None),),
    parts={"hf": Part((ARCHIVE,), _write)},
    module="transformers",
    module_from="torch,models",
)
