"""``plan.json``: every job of a run with all that was resolved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec
from accelmark.spec.plugins.requirements import Need


class PlannedNode(Spec):
    """One host's part in a job."""

    host: str
    """The host's name in directories and reports."""
    noderank: int
    nproc: int
    """Devices that the job uses on this host."""
    command: tuple[str, ...]
    """The command of one rank; ``python`` and ``job.json`` are filled in on the host, where the framework's launch
    starts as many of them as it needs."""


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
    """Packages that the ranks need."""
    installs: tuple[str, ...] = ()
    """Packages that are installed for the ranks before they start."""
    layer_files: tuple[LayerFile, ...] = ()
    """The vendor's configuration files for the case."""
    nodes: tuple[PlannedNode, ...]


class Plan(Spec):
    """A run, resolved: what ``--dry-run`` prints and the coordinator carries out."""

    schema_version: Literal[1] = 1
    name: str
    created_at: str
    """UTC, ISO 8601."""
    accelmark_version: str
    source_sha256: str
    """Hash over AccelMark's own files."""
    vendor: str
    vendor_sha256: str
    open: bool
    strict: bool
    fail_fast: bool
    timeout_s: PositiveFloat | None
    stall_timeout_s: PositiveFloat
    telemetry_interval_s: PositiveFloat
    retry_lost: int = Field(default=0, ge=0)
    """How often a lost job is repeated automatically."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    offline: bool = False
    """Hosts fetch no data; what they have is used."""
    cluster: ClusterSpec
    jobs: tuple[PlannedJob, ...]
    warnings: tuple[str, ...] = ()
