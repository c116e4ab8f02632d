"""No sandbox: the agent runs on the host as it is."""

from __future__ import annotations

from pathlib import Path
from typing import final


@final
class NativeSandbox:
    """Runs the agent with the host's own Python."""

    def agent_command(self, python: str, node_dir: Path) -> list[str]:
        """Return the arguments that start the agent of ``node_dir``."""
        return [python, "-m", "accelmark.run.agent", str(node_dir)]
