"""Build a case's model for programs that look inside a training step, without the driver."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.plugins.catalog import find, load_case
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.case import case_class

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def build(name: str, settings: Mapping[str, Any], device: torch.device) -> TrainCase:
    """Return the case in PyTorch on one rank, with synthetic data and ``settings`` over those of ``case.yaml``."""
    train = load_case(name).train
    assert train is not None
    layers = [Layer("benchmark", {"loader.synthetic": True, **settings})]
    base = Layer.of("case.yaml", train.settings)
    resolved = resolve(TrainSettings, base, layers, mutable=train.mutable, is_open=True).settings
    make_case = case_class(find("cases", name).ref("train"), "pytorch", TrainCase)  # type: ignore[type-abstract]
    return make_case(resolved, {}, Place(0, 1, 1, device, 1))


def attention(kernel: str) -> AbstractContextManager[object]:
    """Return a context in which attention uses ``kernel`` alone, or what PyTorch chooses (``auto``)."""
    return nullcontext() if kernel == "auto" else sdpa_kernel(KERNELS[kernel])
