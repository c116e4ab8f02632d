"""Shakespeare's plays as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError

VOCAB: Final = 256
HELD_OUT: Final = ("macbeth", "richard-ii", "twelfth-night")
"""Plays held out from training: a tragedy, a history, a comedy."""
_Bytes = npt.NDArray[np.uint8]


def read_plays(directory: Path, *, held_out: bool) -> _Bytes:
    """Return the concatenated bytes of the plays in ``HELD_OUT`` or of all others.

    Raises DataError: there are no plays, or a held-out one is missing.
    """
    plays = {path.stem: path for path in directory.rglob("*.md")}
    missing = [name for name in HELD_OUT if name not in plays]
    if missing:
        raise DataError(f"{directory}: expected the plays as *.md here; {', '.join(missing)} not found")
    chosen = [plays[name] for name in sorted(plays) if (name in HELD_OUT) == held_out]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8)


def read_windows(directory: Path, length: int, count: int | None) -> _Bytes:
    """Return windows of ``length + 1`` bytes of the training plays, or ``count`` of the held-out plays, spread evenly.

    Each window starts at the last byte of the one before. Shape (windows, length + 1).
    """
    plays = read_plays(directory, held_out=count is not None)
    windows = np.lib.stride_tricks.sliding_window_view(plays, length + 1)[::length]
    if count is not None:
        windows = windows[np.linspace(0, len(windows) - 1, count).astype(int)]
    return np.ascontiguousarray(windows)
