"""Errors that end an inference run, and the classification of an engine's exception as one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, final

import torch

from accelmark.spec.errors import AccelmarkError, DataError, RequestError, RunError
from accelmark.spec.events import InferEndReason


class InferenceError(RunError):
    """An inference run ended early; ``end_reason`` is the kind, the message the cause and the remedy."""

    end_reason: ClassVar[InferEndReason] = "error"


class CorruptModelError(InferenceError):
    """The ONNX file is not readable."""

    end_reason = "corrupt_model"


class IncompatibleEngineError(InferenceError):
    """The engine file was built for another chip, version or precision, or is damaged."""

    end_reason = "incompatible_engine"


class UnsupportedOperatorError(InferenceError):
    """The engine lacks an operator of the model."""

    end_reason = "unsupported_operator"


class WrongShapeError(InferenceError):
    """The data's shapes or types differ from those of the model."""

    end_reason = "wrong_shape"


class OutOfMemoryError(InferenceError):
    """The device or the host has too little memory for this batch."""

    end_reason = "out_of_memory"


class EngineMissingError(InferenceError):
    """The engine is not installed, or its device is missing."""

    end_reason = "engine_missing"


class PrecisionError(InferenceError):
    """The engine does not support the requested precision."""

    end_reason = "bad_request"


@final
@dataclass(frozen=True, slots=True)
class Context:
    """What was running when an engine failed, for the message."""

    activity: str
    engine: str
    batch_size: int
    device: str


_MEMORY: Final = re.compile(
    r"out of memory|bad_alloc|can't allocate memory|failed to allocate memory|Cannot allocate memory|OutOfMemory"
    r"|allocation of .* failed",
    re.IGNORECASE,
)
_OPERATORS: Final = (
    re.compile(r"Could not find an implementation for (?:the node )?[\w./:-]*?(?P<op>\w+)\(\d+\)"),
    re.compile(r"No Op registered for (?P<op>\w+)"),
    re.compile(r"(?P<op>\w+)(?:\(-?\d+\))? is not a registered function/op"),
    re.compile(r"does not support the following ONNX operations: (?P<op>[\w.:, ]+)"),
    re.compile(r"No conversion rule found for operations: (?P<op>[\w.:, ]+)"),
    re.compile(r"No importer registered for op: (?P<op>\w+)"),
    re.compile(r"Unsupported operator (?P<op>[\w.:]+)"),
)
_CORRUPT: Final = re.compile(
    r"protobuf parsing failed|InvalidProtobuf|ModelProto does not have a graph|Error parsing message|invalid ?graph"
    r"|Unable to read the model|failed to parse|Missing opset|Failed to load model because protobuf",
    re.IGNORECASE,
)
_SHAPE: Final = re.compile(
    r"Got invalid dimensions|Invalid rank for input|Unexpected input data type|shapes? cannot be multiplied"
    r"|expected input.* to have \d+ channels|size mismatch|incompatible with|is not compatible|shape mismatch"
    r"|Expected \d+-dimensional|Expected \d+D|must match the size|invalid for input of size|index out of range in self"
    r"|are incompatible|shape\.compatible|tensor size doesn't match|not compatible with the model|input tensor shape",
    re.IGNORECASE,
)


def classify(error: BaseException, context: Context) -> AccelmarkError:
    """Return ``error`` as the matching class of error; an :class:`AccelmarkError` is returned unchanged."""
    if isinstance(error, AccelmarkError):
        return error
    text = f"{type(error).__name__}: {error}"
    place = f"{context.engine} on {context.device}, {context.activity}"
    first = " ".join(text.split())[:400]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _MEMORY.search(text):
        return OutOfMemoryError(f"{place}: out of memory at batch {context.batch_size}; {_smaller(context)}")
    for pattern in _OPERATORS:
        match = pattern.search(text)
        if match is not None:
            operator = match.group("op").strip()
            hint = "choose another engine, or replace the operator in the model"
            return UnsupportedOperatorError(f"{place}: operator {operator} is not supported; {hint} ({first})")
    if _CORRUPT.search(text):
        return CorruptModelError(f"{place}: the model file is not readable; export it again ({first})")
    if _SHAPE.search(text):
        hint = "compare their shapes and types with those of the exported model"
        return WrongShapeError(f"{place}: the inputs do not match the model; {hint} ({first})")
    return InferenceError(f"{place}: {first}")


def _smaller(context: Context) -> str:
    if context.batch_size == 1:
        return "the model itself does not fit; use a device with more memory or a narrower precision"
    return f"try batch_size {max(1, context.batch_size // 2)}"


def end_reason_of(error: BaseException) -> InferEndReason:
    """Return the end reason of a run that ``error`` ended."""
    if isinstance(error, InferenceError):
        return error.end_reason
    if isinstance(error, DataError):
        return "bad_data"
    if isinstance(error, RequestError):
        return "bad_request"
    return "error"
