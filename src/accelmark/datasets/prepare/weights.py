"""Published weights in files of PyTorch under the names of transformers: ResNet-50-vd of RT-DETR's authors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import UNREADABLE, DataError, raising

ARCHIVE: Final = "ResNet50_vd_ssld_v2_pretrained_from_paddle.pth"
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


def read_weights(path: Path) -> dict[str, Any]:
    """Return what a file of PyTorch has by name, without running code in it; raises DataError where it is damaged."""
    import torch

    unreadable = f"{path}: PyTorch cannot read it as weights alone; download it again"
    with raising(DataError, unreadable, *UNREADABLE, UnpicklingError):
        return dict(torch.load(path, weights_only=True, map_location="cpu"))


def check_weights(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], title: str) -> None:
    """Raise DataError where names or shapes of weights are not those of a model."""
    for name in sorted(expected.keys() | found.keys()):
        shapes = [tuple(getattr(each[name], "shape", ())) if name in each else None for each in (found, expected)]
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: has other weights than {title}: {name} of {shapes[0]}, expected {shapes[1]}")


def _write_resnet50_vd(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``; counters of steps, without meaning here, are left out."""
    import torch
    from safetensors.torch import save_file
    from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

    path, config = archives.paths[ARCHIVE], RTDetrResNetConfig()
    with torch.device("meta"):
        model = RTDetrResNetBackbone(config).state_dict()
    expected, weights = (
        {name: value for name, value in weights.items() if not name.endswith(".num_batches_tracked")}
        for weights in (model, read_weights(path))
    )
    for part, other in _NAMES.items():
        weights = {re.sub(part, other, name): value for name, value in weights.items()}
    check_weights(path, weights, expected, "ResNet-50-vd")
    config.save_pretrained(folder)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


PREPARATION: Final = Preparation(
    archives=[Archive(ARCHIVE, None)],
    parts={"hf": Part((ARCHIVE,), _write_resnet50_vd)},
    requires=("accelmark[torch]", "accelmark[models]"),
)
