"""What a sandbox has to do: say how the node agent is started inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Sandbox(Protocol):
    """Wraps the node agent, so that ranks and recorder run inside and the host needs nothing but the engine."""

    def agent_command(self, python: str, node_dir: Path) -> list[str]:
        """Return the arguments that start the agent of ``node_dir`` on its host."""
        ...
