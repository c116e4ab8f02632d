"""Extrapolate a learning curve, so that short trials can be compared with long ones.

What comes out steers the search and is never scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

_SHIFTS: Final = np.geomspace(0.05, 200.0, 60)
MIN_POINTS: Final = 3


def predicted_accuracy(accuracies: Sequence[float], at_epoch: int) -> float:
    """Return the accuracy expected at epoch ``at_epoch`` (from 1) from those of the first epochs.

    Fits a log2(x + b) + c with a >= 0 by least squares: linear in a and c, b from a grid. The answer is at least the
    best accuracy seen and at most 1. With fewer than three epochs, or none after the last seen, it is the best seen.
    """
    if not accuracies:
        raise ValueError("a learning curve needs at least one epoch")
    seen = np.asarray(accuracies, dtype=np.float64)
    best = float(seen.max())
    if len(seen) < MIN_POINTS or at_epoch <= len(seen):
        return best
    epochs = np.arange(1, len(seen) + 1, dtype=np.float64)
    fitted: tuple[float, float] | None = None
    for shift in _SHIFTS:
        basis = np.log2(epochs + shift)
        slope = max(float(np.cov(basis, seen, bias=True)[0, 1] / basis.var()), 0.0)
        offset = float(seen.mean() - slope * basis.mean())
        error = float(((slope * basis + offset - seen) ** 2).sum())
        if fitted is None or error < fitted[0]:
            fitted = (error, slope * float(np.log2(at_epoch + shift)) + offset)
    expected = fitted[1] if fitted else best
    return min(1.0, max(best, expected))
