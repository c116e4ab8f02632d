"""Whether what an engine answers can be counted: the time it leaves out of a call."""

from __future__ import annotations

import math

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
