"""Names for the columns that figures are computed from; numpy itself is imported where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Indices = NDArray[np.integer[Any]]
    Column = Sequence[float] | Floats
