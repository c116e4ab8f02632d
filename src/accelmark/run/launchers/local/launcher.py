"""Launch node agents on this machine, as processes or in containers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from accelmark.run.host import python_path
from accelmark.run.launchers.shared_filesystem import SharedFilesystemLauncher
from accelmark.spec.cluster import HostSpec


class _LocalLauncher(SharedFilesystemLauncher):
    @property
    def python(self) -> str:
        return sys.executable

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark is in containers; other processes inherit this one's environment."""
        if self.plan.cluster.container is not None:
            return super().variables
        path = os.pathsep.join(python_path())
        return {"PYTHONPATH": path} if path else {}

    async def master_address(self, host: HostSpec) -> str:
        return "127.0.0.1"


create = _LocalLauncher
