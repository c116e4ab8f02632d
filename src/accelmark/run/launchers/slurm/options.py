"""Settings that the Slurm launcher adds to a cluster file."""

from __future__ import annotations

from accelmark.spec.plugins.launcher import LauncherOptions


class Options(LauncherOptions):
    """Settings of the Slurm launcher."""

    slurm_options: tuple[str, ...] = ()
    """Options of ``sbatch`` where an allocation has to be requested (``--partition=gpu``)."""
