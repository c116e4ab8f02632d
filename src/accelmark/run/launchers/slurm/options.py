"""Settings that the Slurm launcher adds to a cluster file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Final

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.launcher import LauncherOptions

WHOLE_NODES: Final = ("--exclusive", "--mem=0")
"""Options of ``sbatch`` for all cores and all memory of the nodes; without them a job has one core of each."""
_NODES_VARIABLE: Final = "SLURM_JOB_NODELIST"


class Options(LauncherOptions):
    """Settings of the Slurm launcher."""

    slurm_options: tuple[str, ...] = ()
    """Options of ``sbatch`` where an allocation must be requested (``--partition=gpu``)."""

    def require_allocated(self, nodes: Sequence[str]) -> None:
        """Check that nodes are in the current allocation. Raises RequestError: they are not; names them."""
        allocated = os.environ.get(_NODES_VARIABLE)
        if allocated is not None and (missing := sorted(set(nodes) - set(self.default_hosts()))):
            problem = f"{', '.join(missing)}: not in the current allocation of Slurm, which has {allocated}"
            raise RequestError(f"{problem}; correct hosts in the cluster file, or remove them to use its nodes")

    def default_hosts(self) -> Sequence[str]:
        """Return the nodes of the current allocation."""
        nodes = os.environ.get(_NODES_VARIABLE)
        if nodes is None:
            problem = "launcher: slurm without hosts means the nodes of the current allocation, and there is none"
            raise RequestError(f"{problem}: list hosts, or run this inside an allocation")
        try:
            done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RequestError(f"{_NODES_VARIABLE}={nodes} cannot be expanded by scontrol: {error}") from error
        return done.stdout.split()
