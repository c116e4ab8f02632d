"""Whether what an engine answers can be counted: its outputs, and the time it leaves out of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from accelmark.infer.failures import InferenceError


def check_declared(other_s: object, took_s: float, engine: str) -> None:
    """Check the seconds of a call that an engine declares as not inference.

    Args:
        other_s: what it declared.
        took_s: what the call took.
        engine: its name, for the message.

    Raises:
        InferenceError: it is no finite number from 0 to ``took_s``.
    """
    if not (isinstance(other_s, int | float) and math.isfinite(other_s) and 0 <= other_s <= took_s):
        raise InferenceError(
            f"engine {engine}: declares {other_s!r} s of a call as not inference; it has to return (outputs, seconds) "
            f"with seconds from 0 to what the call took, {took_s:.6f} s"
        )


def check_outputs(outputs: object, engine: str) -> None:
    """Check what an engine returns for a batch.

    Raises:
        InferenceError: it is no list of one or more tensors on the CPU.
    """
    if isinstance(outputs, list | tuple) and outputs:
        strange = [each for each in outputs if not (isinstance(each, Tensor) and each.device.type == "cpu")]
        if not strange:
            return
        first = strange[0]
        what = f"a tensor on {first.device}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        found = f"{what} among its outputs"
    else:
        found = "nothing" if outputs is None or isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
    raise InferenceError(f"engine {engine}: returns {found}; it has to return a list of tensors on the CPU")


def check_apart(calls: Sequence[Sequence[Tensor]], engine: str) -> None:
    """Check that the outputs of calls, all of them still held, lie in memory of their own.

    Raises:
        InferenceError: those of two calls share memory, so that a later call has overwritten an earlier one's answer.
    """
    spans = sorted(
        (output.data_ptr(), output.data_ptr() + output.nbytes, number)
        for number, outputs in enumerate(calls)
        for output in outputs
        if output.nbytes
    )
    reached, owner = 0, -1
    for begin, end, number in spans:
        if begin < reached and number != owner:
            raise InferenceError(
                f"engine {engine}: outputs of two calls lie in the same memory; an output belongs to the caller, "
                "so a buffer that the next call writes to has to be copied first"
            )
        if end > reached:
            reached, owner = end, number
