"""Sandboxes: how a module of AccelMark is started on a host, with or without a container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final


@final
@dataclass(frozen=True, slots=True)
class ModuleCommand:
    """A module of AccelMark to run in a sandbox, and what it needs there."""

    module: str
    """Argument of ``python -m``."""
    arguments: tuple[str, ...]
    name: str
    """Unique on its host."""
    environment: Mapping[str, str]
    writable: Sequence[Path] = ()
    """Directories that it writes to; they have the same paths inside."""
    readable: Sequence[Path] = ()


class Sandbox(Protocol):
    """The environment that the node agent, its recorder and its ranks run in."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the arguments that run ``inside`` on a host; ``python`` is the host's own."""
        ...

    def removal(self, name: str) -> list[str] | None:
        """Return the arguments that end and remove the sandbox ``name``; None where nothing has to be removed."""
        ...


@final
class NativeSandbox:
    """Runs commands on the host itself, with its Python."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the arguments that run ``inside``."""
        variables = [f"{name}={value}" for name, value in inside.environment.items()]
        return ["env", *variables, python, "-m", inside.module, *inside.arguments]

    def removal(self, name: str) -> list[str] | None:
        """Return None: processes of a killed agent are found by the markers in their environment."""
        return None
