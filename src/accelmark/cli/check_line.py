"""One line of what ``accelmark check`` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One promise of a folder."""

    state: Literal["good", "missing", "advice"]
    what: str
    do: str = ""
    """What to do where it is not kept."""
