"""Weights of ResNet-50-vd from the file that RT-DETR's authors publish, under the names of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.datasets.pytorch_weights import check_weights, read_weights

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
        model = RTDetrResNetBackbone(config).state_dict()
    expected, found = (
        {name: value for name, value in weights.items() if not str(name).endswith(_COUNTER)}
        for weights in (model, read_weights(path))
    )
    weights = {_renamed(name): value for name, value in found.items()}
    check_weights(path, weights, expected, "ResNet-50-vd's weights")
    config.save_pretrained(folder)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


PREPARATION: Final = Preparation(
    archives=(Archive(ARCHIVE, None),),
    parts={"hf": Part((ARCHIVE,), _write)},
    requires=("accelmark[torch]", "accelmark[models]"),
)
