"""Which launcher a plan's cluster asks for."""

from __future__ import annotations

from pathlib import Path

from accelmark.plan.plan import Plan
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.local.container import EnclosedLauncher
from accelmark.run.launchers.local.launcher import LocalLauncher
from accelmark.run.launchers.slurm.launcher import SlurmLauncher
from accelmark.run.launchers.ssh.launcher import SshLauncher


def launcher_for(plan: Plan, run: Path) -> Launcher:
    """Return the launcher that a plan's cluster asks for, for the run at ``run``."""
    if plan.cluster.launcher == "ssh":
        return SshLauncher(plan, run)
    if plan.cluster.launcher == "slurm":
        return SlurmLauncher(plan, run)
    return LocalLauncher(run) if plan.cluster.container is None else EnclosedLauncher(plan, run)
