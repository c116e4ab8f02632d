"""The ends of an inference run that a person can act on, and how an engine's exception is read as one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, final

import torch

from accelmark.spec.errors import AccelmarkError, DataError, RequestError, RunError
from accelmark.spec.inference.events import InferEndReason


class InferenceError(RunError):
    """An inference run ended early; ``end_reason`` says how, the message why and what to do."""

    end_reason: ClassVar[InferEndReason] = "error"


class CorruptModelError(InferenceError):
    """The ONNX file cannot be read."""

    end_reason = "corrupt_model"


class IncompatibleEngineError(InferenceError):
    """The engine file was built for another chip, version or precision, or is damaged."""

    end_reason = "incompatible_engine"


class UnsupportedOperatorError(InferenceError):
    """The engine lacks an operator of the model."""

    end_reason = "unsupported_operator"


class WrongShapeError(InferenceError):
    """The data's shapes or types are not those the model was built for."""

    end_reason = "wrong_shape"


class OutOfMemoryError(InferenceError):
    """The device or the host has not enough memory for this batch."""

    end_reason = "out_of_memory"


class EngineMissingError(InferenceError):
    """The engine is not installed here, or its device is not."""

    end_reason = "engine_missing"


class PrecisionError(InferenceError):
    """The engine cannot compute in the precision asked for."""

    end_reason = "bad_request"


@final
@dataclass(frozen=True, slots=True)
class Situation:
    """What an engine was doing when it failed, for the message."""

    doing: str
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


def explained(error: BaseException, situation: Situation) -> AccelmarkError:
    """Return the typed end that ``error`` comes to; an :class:`AccelmarkError` is returned as it is."""
    if isinstance(error, AccelmarkError):
        return error
    text = f"{type(error).__name__}: {error}"
    place = f"{situation.engine} on {situation.device}, {situation.doing}"
    first = " ".join(text.split())[:400]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _MEMORY.search(text):
        return OutOfMemoryError(f"{place}: out of memory at batch {situation.batch_size}; {_smaller(situation)}")
    for pattern in _OPERATORS:
        match = pattern.search(text)
        if match is not None:
            operator = match.group("op").strip()
            hint = "choose another engine, or write the model without it"
            return UnsupportedOperatorError(f"{place}: has no operator {operator}; {hint} ({first})")
    if _CORRUPT.search(text):
        return CorruptModelError(f"{place}: the model file cannot be read; export it again ({first})")
    if _SHAPE.search(text):
        hint = "compare the data's shapes and types with those the model was exported for"
        return WrongShapeError(f"{place}: the inputs do not fit the model; {hint} ({first})")
    return InferenceError(f"{place}: {first}")


def _smaller(situation: Situation) -> str:
    if situation.batch_size == 1:
        return "the model itself does not fit; use a device with more memory or a narrower precision"
    return f"try batch_size {max(1, situation.batch_size // 2)}"


def end_reason_of(error: BaseException) -> InferEndReason:
    """Return the closed word for how ``error`` ended the run."""
    if isinstance(error, InferenceError):
        return error.end_reason
    if isinstance(error, DataError):
        return "bad_data"
    if isinstance(error, RequestError):
        return "bad_request"
    return "error"
