"""Weights under their authors' names become weights under those of transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

from accelmark.datasets.ensure import preparation_of
from accelmark.datasets.prepare.preparation import prepare
from accelmark.datasets.prepare.resnet50_vd_weights import ARCHIVE
from accelmark.frameworks.pytorch.model.pretrained import load_backbone
from accelmark.spec.errors import DataError


def authors_name(name: str) -> str:
    """Return the name in RT-DETR's code (``rtdetr_pytorch/src/nn/backbone/presnet.py``) of a weight."""
    part = name.removeprefix("encoder.").split(".")
    kind = {"convolution": "conv", "normalization": "norm"}[part[-2]]
    if part[0] == "embedder":
        return f"conv1.conv1_{int(part[2]) + 1}.{kind}.{part[-1]}"
    inner = "short.conv" if part[4:6] == ["shortcut", "1"] else "short"
    if part[4] == "layer":
        inner = f"branch2{'abc'[int(part[5])]}"
    return f"res_layers.{part[1]}.blocks.{part[3]}.{inner}.{kind}.{part[-1]}"


@pytest.fixture
def numbers() -> dict[str, Tensor]:
    """Return the published weights by their names in transformers: all of a tensor's elements are its number."""
    with torch.device("meta"):
        state = RTDetrResNetBackbone(RTDetrResNetConfig()).state_dict()
    kept = [name for name in state if not name.endswith("num_batches_tracked")]
    return {name: torch.tensor(float(number)).expand(state[name].shape) for number, name in enumerate(kept)}


def prepared(content: Any, directory: Path) -> Path:
    source = directory / "archives"
    source.mkdir()
    torch.save(content, source / ARCHIVE)
    prepare(*preparation_of("resnet50_vd_weights"), source, directory / "to")
    return directory / "to"


def test_resnet50_vd_is_read_by_the_backbone_of_rt_detr(tmp_path: Path, numbers: dict[str, Tensor]) -> None:
    published = {authors_name(name): value for name, value in numbers.items()}
    assert "res_layers.1.blocks.0.short.conv.conv.weight" in published
    to = prepared(published | {"conv1.conv1_1.norm.num_batches_tracked": torch.tensor(0)}, tmp_path)
    backbone = RTDetrResNetBackbone(RTDetrResNetConfig())
    load_backbone(backbone, to)
    state = backbone.state_dict()
    assert [name for name, value in numbers.items() if not torch.equal(state[name], value)] == []


class Command:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._path,)


def test_code_in_the_file_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(DataError, match="PyTorch cannot read it as weights alone"):
        prepared({"conv1.conv1_1.conv.weight": Command(ran)}, tmp_path)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Command(ran)))  # noqa: S301
    assert ran.exists(), "an ordinary reader runs it"
