"""``plan.json``: all jobs of a run with resolved settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec
from accelmark.spec.plugins.requirements import Need
from accelmark.spec.runfile import RunOptions
from accelmark.spec.settings.tuning import TuningSpec


class PlannedNode(Spec):
    """One host's part in a job."""

    host: str
    noderank: int
    nproc: int
    command: tuple[str, ...]
    """Command of one rank; the host fills in ``python`` and ``job.json``, the framework starts the ranks."""


class LayerFile(Spec):
    """A configuration file in the vendor's folder for a case, and whether it applies to a key."""

    file: str
    applied: bool
    reason: str


class PlannedJob(Spec):
    """One round of one key."""

    directory: str
    """``<key slug>/round<N>``, relative to the run directory."""
    job: JobSpec
    requires: tuple[Need, ...] = ()
    installs: tuple[str, ...] = ()
    """Packages that are installed for the ranks before they start."""
    layer_files: tuple[LayerFile, ...] = ()
    nodes: tuple[PlannedNode, ...]


class Plan(RunOptions):
    """A resolved run, printed by ``--dry-run`` and executed by the coordinator."""

    schema_version: Literal[1] = 1
    name: str
    run_id: str = ""
    """Identifies the run on its hosts, among all runs of all coordinators; empty before it has a directory."""
    created_at: str
    accelmark_version: str
    source_sha256: str
    vendor: str
    vendor_sha256: str
    plugins: tuple[Path, ...] = ()
    offline: bool = False
    cluster: ClusterSpec
    jobs: tuple[PlannedJob, ...]
    tuning: TuningSpec | None = None
    missing_data: tuple[Problem, ...] = ()
    """Data, devices and versions without which a dry run was planned; a plan that lacks any is not executed."""
    warnings: tuple[str, ...] = ()
