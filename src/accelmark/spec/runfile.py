"""Schema of a run file, the input of ``accelmark run FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, Tag

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.model import FiniteSpec
from accelmark.spec.rules import RulesOfRun


class CaseRequest(FiniteSpec):
    """One key of a run, with its data and changed settings; a plain string is a key."""

    key: str
    """``model[:framework[:hardware[:nnodes[:nproc[:repeat]]]]]``."""
    task: Literal["train", "infer", "serve"] = "train"
    """Train the model, run inference with it, or measure a server of it under load."""
    data: Path | None = None
    """Directory with the case's data and weights; null: fetch what can be fetched."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Dotted settings that differ from the case's: ``{optimizer.lr: 0.1}``."""


CaseOrKey = Annotated[
    CaseRequest,
    BeforeValidator(
        lambda given: {"key": given} if isinstance(given, str) else given,
        json_schema_input_type=Union[CaseRequest, str],
    ),
]
ClusterOrFile = Annotated[
    Union[Annotated[ClusterSpec, Tag("[cluster]")], Annotated[Path, Tag("[file]")]],
    Discriminator(lambda given: "[file]" if isinstance(given, (str, Path)) else "[cluster]"),
]
"""A cluster, or the path of a cluster file, as a tagged union for clear error messages."""


class RunOptions(FiniteSpec):
    """Options of a run that apply to all its cases."""

    open: bool = False
    """Allow changes to immutable settings; every result is permanently marked OPEN."""
    strict: bool = False
    """Treat preflight warnings (a busy machine, differing drivers) as errors."""
    fail_fast: bool = False
    """Start no further round after a failure."""
    timeout_s: PositiveFloat | None = None
    """Maximum duration of one round from its launch; null: no limit."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Maximum time without an event from a rank, or between its last event and its exit; then the job is stopped."""
    telemetry_interval_s: PositiveFloat = 1.0
    """Seconds between samples of hosts and devices."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of ``coordinator.log`` in the run directory."""
    rules: RulesOfRun | None = None
    """Rules of training: a rule set of AccelMark's (``aiperf-moe``), or the path of a file; null: the cases' own."""
    retry_lost: int = Field(default=0, ge=0, le=10)
    """How often a lost round (its host or agent is unreachable) is repeated automatically; failed rounds are not."""


class RunSpec(RunOptions):
    """A run file: a list of cases on one cluster."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run, part of its directory's name."""
    vendor: str | None = None
    """null: the cluster's vendor, else the one detected."""
    cluster: ClusterOrFile = ClusterSpec()
    """A cluster, or the path of a cluster file relative to the run file."""
    runs: Path | None = None
    """Directory in which the run directory is made, relative to the run file; null: ``runs``."""
    cases: tuple[CaseOrKey, ...] = Field(min_length=1)
