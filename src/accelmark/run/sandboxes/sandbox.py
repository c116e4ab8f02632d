"""What a sandbox has to do: say how a command of AccelMark is started inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final


@final
@dataclass(frozen=True, slots=True)
class Inside:
    """A command for a sandbox, and what it needs there."""

    module: str
    """``python -m`` what."""
    arguments: tuple[str, ...]
    name: str
    """Unique on its host."""
    environment: Mapping[str, str]
    writable: Sequence[Path] = ()
    """Directories that it writes to, at the same paths inside."""
    readable: Sequence[Path] = ()


class Sandbox(Protocol):
    """Wraps the node agent, so that ranks and recorder run inside and the host needs nothing but the engine."""

    def command(self, python: str, inside: Inside) -> list[str]:
        """Return the arguments that run ``inside`` on its host; ``python`` is the host's own."""
        ...

    def clean_up(self, name: str) -> list[str] | None:
        """Return the arguments that end what bears ``name`` whatever it does, or None where there is nothing to."""
        ...
