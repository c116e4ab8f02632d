"""Launch node agents on this machine, as processes or in containers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import final

from accelmark.run.launchers.shared_filesystem import (
    SharedFilesystemLauncher,
)
from accelmark.spec.cluster import HostSpec


@final
class LocalLauncher(SharedFilesystemLauncher):
    """Starts agents on this machine."""

    @property
    def python(self) -> str:
        """The Python that runs this program; containers have another."""
        return sys.executable

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark is in containers; other processes inherit this one's environment."""
        return _python_path() if self.plan.cluster.container is None else super().variables

    async def master_address(self, host: HostSpec) -> str:
        """Return the loopback address; containers use the host's network."""
        return "127.0.0.1"


create = LocalLauncher


def _python_path() -> dict[str, str]:
    """Return ``PYTHONPATH``, where it is set, for another working directory than this process's."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = os.pathsep.join(os.path.abspath(entry) for entry in entries)  # noqa: PTH100
    return {"PYTHONPATH": absolute} if absolute else {}
