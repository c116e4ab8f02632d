"""Errors that end an inference run, and the classification of an engine's exception by its message."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, final

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


class Context(NamedTuple):
    """The call in which an engine failed, for the message."""

    activity: str
    engine: str
    batch_size: int
    device: str


_KINDS: Final[dict[InferEndReason, tuple[str, str]]] = {
    "out_of_memory": (
        r"out of memory|bad_alloc|MemoryError|can't allocate memory|failed to allocate memory|Cannot allocate memory"
        r"|OutOfMemory|allocation of .* failed",
        "out of memory at batch {size}; try a smaller batch_size, more memory or a narrower precision",
    ),
    "unsupported_operator": (
        r"Could not find an implementation for|No Op registered for|is not a registered function/op"
        r"|does not support the following ONNX operations|No conversion rule found for operations"
        r"|No importer registered for op|Unsupported operator",
        "an operator is not supported; choose another engine, or replace the operator in the model ({text})",
    ),
    "corrupt_model": (
        r"protobuf parsing failed|InvalidProtobuf|ModelProto does not have a graph|No graph was found|invalid ?graph"
        r"|Error parsing message|Unable to read the model|failed to parse|Missing opset",
        "the model file is not readable; export it again ({text})",
    ),
    "wrong_shape": (
        r"Got invalid dimensions|Invalid rank for input|Unexpected input data type|shapes? cannot be multiplied"
        r"|expected input.* to have \d+ channels|size mismatch|incompatible with|is not compatible|shape mismatch"
        r"|Expected \d+-dimensional|Expected \d+D|must match the size|invalid for input of size"
        r"|index out of range in self|are incompatible|shape\.compatible|tensor size doesn't match"
        r"|not compatible with the model|input tensor shape",
        "the inputs do not match the model; compare their shapes and types with the exported model ({text})",
    ),
}
"""End reason -> the words of runtimes in such an error, and its cause and remedy."""


def classify(error: BaseException, context: Context) -> AccelmarkError:
    """Return ``error`` with its end reason; an :class:`AccelmarkError` is returned unchanged."""
    if isinstance(error, AccelmarkError):
        return error
    text = str(error) if isinstance(error, EngineExceptionError) else f"{type(error).__name__}: {error}"
    place = f"{context.engine} on {context.device}, {context.activity}"
    for end_reason, (words, problem) in _KINDS.items():
        if re.search(words, text, re.IGNORECASE):
            problem = problem.format(size=context.batch_size, text=shortened(text, 400))
            return InferenceError(f"{place}: {problem}", end_reason)
    return InferenceError(f"{place}: {shortened(text, 400)}")


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
