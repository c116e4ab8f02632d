"""Errors that end an inference run, and the classification of an engine's exception by its message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from accelmark.spec.errors import AccelmarkError, DataError, RequestError, RunError
from accelmark.spec.log.inference import InferEndReason


@final
class InferenceError(RunError):
    """An inference run ended early; the message has the cause and the remedy."""

    def __init__(self, message: str, end_reason: InferEndReason = "error") -> None:
        super().__init__(message)
        self.end_reason: InferEndReason = end_reason


@final
class EngineExceptionError(Exception):
    """An exception of the engine's process, as ``Type: message``."""


def described(error: Exception) -> dict[str, str]:
    """Return an exception of the engine's process as a message to the rank."""
    if isinstance(error, AccelmarkError):
        return {"error": str(error), "end_reason": end_reason_of(error)}
    return {"error": f"{type(error).__name__}: {error}"}


def restored(message: Mapping[str, Any]) -> Exception:
    """Return the exception that :func:`described` describes."""
    text = str(message["error"])
    return InferenceError(text, message["end_reason"]) if "end_reason" in message else EngineExceptionError(text)


@final
@dataclass(frozen=True)
class Context:
    """The call in which an engine failed, for the message."""

    activity: str
    engine: str
    batch_size: int
    device: str


_MEMORY: Final = re.compile(
    r"out of memory|bad_alloc|^MemoryError|can't allocate memory|failed to allocate memory|Cannot allocate memory"
    r"|OutOfMemory|allocation of .* failed",
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
    """Return ``error`` with its end reason; an :class:`AccelmarkError` is returned unchanged."""
    if isinstance(error, AccelmarkError):
        return error
    text = str(error) if isinstance(error, EngineExceptionError) else f"{type(error).__name__}: {error}"
    place = f"{context.engine} on {context.device}, {context.activity}"
    first = shortened(text, 400)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _MEMORY.search(text):
        remedy = f"try batch_size {context.batch_size // 2}"
        if context.batch_size == 1:
            remedy = "the model itself does not fit; use a device with more memory or a narrower precision"
        return InferenceError(f"{place}: out of memory at batch {context.batch_size}; {remedy}", "out_of_memory")
    for pattern in _OPERATORS:
        if match := pattern.search(text):
            problem = f"operator {match.group('op').strip()} is not supported"
            hint = "choose another engine, or replace the operator in the model"
            return InferenceError(f"{place}: {problem}; {hint} ({first})", "unsupported_operator")
    if _CORRUPT.search(text):
        return InferenceError(f"{place}: the model file is not readable; export it again ({first})", "corrupt_model")
    if _SHAPE.search(text):
        hint = "compare their shapes and types with the exported model"
        return InferenceError(f"{place}: the inputs do not match the model; {hint} ({first})", "wrong_shape")
    return InferenceError(f"{place}: {first}")


def shortened(text: object, limit: int) -> str:
    """Return a message on one line, cut after ``limit`` characters."""
    return " ".join(str(text).split())[:limit]


def end_reason_of(error: BaseException) -> InferEndReason:
    """Return the end reason of a run that ``error`` ended."""
    if isinstance(error, InferenceError):
        return error.end_reason
    if isinstance(error, DataError):
        return "bad_data"
    return "bad_request" if isinstance(error, RequestError) else "error"
