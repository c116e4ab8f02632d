"""The contract of an engine's outputs, checked in its own process for a clear message; the rank compares the values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from accelmark.infer.failures import InferenceError


def check_outputs(
    result: object, engine: str, items: int | None = None, rows: Sequence[tuple[str, tuple[int, ...]]] | None = None
) -> None:
    """Check what an engine returns for a call of ``items`` items; ``rows`` are the type and shape of an item.

    Raises:
        InferenceError: it is not (list of tensors on the CPU, seconds), or not the rows of these items.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise InferenceError(f"engine {engine}: returns a {type(result).__name__}; it has to return (outputs, seconds)")
    outputs, _ = result
    if isinstance(outputs, list | tuple) and outputs:
        wrong = [each for each in outputs if not (isinstance(each, Tensor) and each.device.type == "cpu")]
        if not wrong:
            _check_rows(outputs, engine, items, rows)
            return
        first = wrong[0]
        what = f"a tensor on {first.device}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        found = f"{what} among its outputs"
    else:
        found = "nothing" if outputs is None or isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
    raise InferenceError(f"engine {engine}: returns {found}; it has to return a list of tensors on the CPU")


def _check_rows(
    outputs: Sequence[Tensor], engine: str, items: int | None, rows: Sequence[tuple[str, tuple[int, ...]]] | None
) -> None:
    found = [(str(each.dtype).removeprefix("torch."), tuple(each.shape[1:])) for each in outputs]
    if items is not None and any(not each.ndim or each.shape[0] != items for each in outputs):
        short = next(each for each in outputs if not each.ndim or each.shape[0] != items)
        what = f"returns {short.shape[0] if short.ndim else 'no'} rows for {items} items"
        raise InferenceError(f"engine {engine}: {what}; export the model with a dynamic batch", "wrong_shape")
    if rows is not None and found != [(dtype, tuple(shape)) for dtype, shape in rows]:
        what = f"returns {found}, in its warm-up {list(rows)}"
        raise InferenceError(f"engine {engine}: {what} (types and shapes of an item)", "wrong_shape")


def check_excluded_time(other_s: float, took_s: float, engine: str) -> None:
    """Check the seconds of a call of ``took_s`` that ``engine`` reports as not inference.

    Raises:
        InferenceError: the value is not a finite number from 0 to ``took_s``.
    """
    if not (math.isfinite(other_s) and 0 <= other_s <= took_s):
        raise InferenceError(
            f"engine {engine}: reports {other_s!r} s of a call as not inference; it has to return (outputs, seconds) "
            f"with seconds from 0 to the duration of the call, {took_s:.6f} s"
        )


def check_separate_memory(calls: Sequence[Sequence[Tensor]], engine: str) -> None:
    """Check that the outputs of several calls, all still referenced, do not share memory.

    Raises:
        InferenceError: two calls share memory, so that the later one has overwritten the outputs of the earlier one.
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
                f"engine {engine}: outputs of two calls share memory; outputs belong to the caller, "
                "so copy a buffer that the next call overwrites"
            )
        if end > reached:
            reached, owner = end, number
