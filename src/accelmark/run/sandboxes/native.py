"""No sandbox: commands run on the host as it is."""

from __future__ import annotations

from typing import final

from accelmark.run.sandboxes.sandbox import Inside


@final
class NativeSandbox:
    """Runs everything with the host's own Python."""

    def command(self, python: str, inside: Inside) -> list[str]:
        """Return the arguments that run ``inside``."""
        variables = [f"{name}={value}" for name, value in inside.environment.items()]
        return ["env", *variables, python, "-m", inside.module, *inside.arguments]

    def clean_up(self, name: str) -> list[str] | None:
        """Return nothing: a killed agent leaves processes, which bear its mark."""
        return None
