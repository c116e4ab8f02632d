"""Convert an fp32 ONNX file to fp16 or int8, for engines that take the precision from the file."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor

from accelmark.infer.engine import CALIBRATION_ITEMS, Engine
from accelmark.telemetry.host.sysinfo import cpu_features

_VNNI: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Extensions that sum products of 8-bit numbers in 32 bits."""


def write_fp16(source: Path, target: Path) -> None:
    """Write ``source`` with fp16 weights and arithmetic; inputs and outputs stay fp32."""
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def write_int8(source: Path, target: Path, engine: Engine, *, on_cpu: bool) -> dict[str, str]:
    """Write ``source`` quantised to int8 (static, per channel), calibrated on what the engine was given for it.

    Weights have 7 bits for an x86 CPU without VNNI, whose products of 8-bit numbers are summed with saturation, so that
    the answers would be wrong (the remedy of both OpenVINO's and ONNX Runtime's documentation); else 8. Returns the
    bits as an engine describes them.
    """
    saturates = on_cpu and platform.machine() == "x86_64" and not _VNNI & cpu_features()
    logging.getLogger("root").setLevel(logging.ERROR)  # the quantiser logs advice to the root logger
    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    graph = onnx.load(prepared, load_external_data=False).graph
    names = engine.named("inputs", [each.name for each in graph.input])
    quantize_static(
        str(prepared),
        str(target),
        _CalibrationReader(dict(zip(names, engine.request.calibration, strict=True))),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=saturates,
    )
    prepared.unlink()
    return {"weight_bits": "7 (the CPU has no VNNI)" if saturates else "8"}


@final
class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc] # untyped package
    """Yields one item at a time."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        parts = {name: torch.split(each[:CALIBRATION_ITEMS], 1) for name, each in inputs.items()}
        self.feeds = iter(
            {name: each.numpy() for name, each in zip(parts, item, strict=True)}
            for item in zip(*parts.values(), strict=True)
        )

    def get_next(self) -> dict[str, Any] | None:
        """Return the next item, None at the end."""
        return next(self.feeds, None)
