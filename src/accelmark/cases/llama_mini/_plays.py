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


def windows(directory: Path, length: int, *, held_out: bool) -> npt.NDArray[np.uint8]:
    """Return consecutive windows of ``length + 1`` bytes of the plays in ``HELD_OUT`` or of all others.

    Each window starts at the last byte of the one before; the result has shape (windows, length + 1).

    Raises:
        DataError: there are no plays, or a held-out one is missing.
    """
    plays = {path.stem: path for path in directory.rglob("*.md")}
    missing = [name for name in HELD_OUT if name not in plays]
    if missing:
        raise DataError(f"{directory}: expected the plays as *.md here; {', '.join(missing)} not found")
    chosen = [plays[name] for name in sorted(plays) if (name in HELD_OUT) == held_out]
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]
