"""The layers of a case's settings that lie in files: the case's own and its vendor's."""

from __future__ import annotations

from pathlib import Path

from accelmark.spec.case import TrainCaseSpec
from accelmark.spec.catalog import Folder
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer
from accelmark.spec.yaml_file import read_yaml


def case_layer(folder: Folder, train: TrainCaseSpec) -> Layer:
    """Return the weakest layer: the settings of ``case.yaml``."""
    return Layer.of(f"cases/{folder.name}/case.yaml", train.settings)


def vendor_layers(adaptation: Path, vendor: str, key: CaseKey) -> list[Layer]:
    """Return the vendor's layers for ``key``, weakest first: for every scale, then for this chip and scale."""
    scale = f"config_{key.hardware}x{key.nnodes}x{key.nproc}.yaml"
    layers: list[Layer] = []
    for name in ("config.yaml", scale):
        path = adaptation / name
        if path.is_file():
            layers.append(Layer.of(f"vendors/{vendor}/cases/{adaptation.name}/{name}", read_yaml(path)))
    return layers
