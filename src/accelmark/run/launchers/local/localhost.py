"""What launching on this machine is, whatever agents run in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from accelmark.run.launchers.step import source_directory
from accelmark.spec.cluster import HostSpec


class ThisMachine:
    """The part of a :class:`Launcher` that follows from its hosts being this machine: always there, and not far."""

    fetches_here = True
    python = sys.executable

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where this AccelMark is."""
        return {"PYTHONPATH": str(source_directory())}

    def first(self) -> list[list[str]]:
        """Return nothing: this machine is there."""
        return []

    def on(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command as it is."""
        return list(argv)

    def master_address(self, host: HostSpec) -> str:
        """Return the loopback address: all ranks are here, and containers are on the host's network."""
        return "127.0.0.1"

    def environment(self) -> Mapping[str, str]:
        """Return nothing: ranks here need no more than their task says."""
        return {}

    async def tidy(self, hosts: Sequence[HostSpec]) -> list[str]:
        """Do nothing: agents of this machine are never out of reach."""
        return []

    async def close(self) -> None:
        """Do nothing: there are no connections."""
