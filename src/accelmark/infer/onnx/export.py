"""Export a PyTorch model to an ONNX file."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from accelmark.infer.failures import InferenceError
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.requirements import pip_install

_PROTOBUF_LIMIT: Final = 1_900_000_000
"""Size of weights above which the exporter writes them to a separate file (protobuf's limit is 2 GiB)."""


def import_exporter() -> None:
    """Import what the export uses, which takes more than a second; what is missing is reported by the export."""
    with contextlib.suppress(ImportError):
        for name in ("onnx", "onnxscript", "torch._dynamo"):
            importlib.import_module(name)


def export_onnx(
    model: nn.Module, example: Sequence[Tensor], path: Path, input_names: Sequence[str], output_names: Sequence[str]
) -> None:
    """Export ``model`` to ``path`` with the batch as a dynamic first dimension of every input.

    Raises:
        InferenceError: the exporter's packages are not installed.
        RequestError: the numbers of inputs and of names differ.
    """
    try:
        import onnx  # noqa: F401 - only the export needs it
        import onnxscript  # noqa: F401
    except ImportError as error:
        what = f"the ONNX export needs onnx and onnxscript: run {pip_install(['onnx', 'onnxscript'])}"
        raise InferenceError(what, "engine_missing") from error
    if len(example) != len(input_names):
        raise RequestError(f"the case names {len(input_names)} inputs, its data has {len(example)}")
    # The exporter treats a dimension of 1 as constant, so the example needs at least two items.
    inputs = tuple(torch.cat([each, each])[:2] if each.shape[0] < 2 else each[:2] for each in example)
    weights = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    batch = torch.export.Dim("batch", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):  # deprecations inside the exporter
        torch.onnx.export(
            model,
            inputs,
            path,
            input_names=list(input_names),
            output_names=list(output_names),
            dynamo=True,
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            external_data=weights > _PROTOBUF_LIMIT,
            verbose=False,
        )
