"""A run file: what one ``accelmark run FILE`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.model import Spec


class CaseRequest(Spec):
    """One key of a run, with its data and the settings that this run changes; a word alone is a key."""

    key: str
    task: Literal["train", "infer"] = "train"
    data: Path | None = None
    """Directory with the case's data and weights; null fetches what can be fetched."""
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _key_alone(cls, given: Any) -> Any:
        return {"key": given} if isinstance(given, str) else given


def _cluster_kind(given: Any) -> str:
    return "[file]" if isinstance(given, str | Path) else "[cluster]"


ClusterOrFile = Annotated[
    Annotated[ClusterSpec, Tag("[cluster]")] | Annotated[Path, Tag("[file]")], Discriminator(_cluster_kind)
]
"""A cluster, or the path of a cluster file; errors name the type that was meant."""


class RunSpec(Spec):
    """A list of cases on one cluster."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    vendor: str | None = None
    """null: the cluster's vendor, else the one detected."""
    open: bool = False
    """Allow changes to immutable settings; every result is permanently marked OPEN."""
    strict: bool = False
    """Refuse to start where a warning would be given (a busy machine, differing drivers)."""
    fail_fast: bool = False
    timeout_s: PositiveFloat | None = None
    """Longest time one round may take from launch to its end; null: no limit."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Longest time without an event of a rank, or from its last one to its end, before its job is ended as stalled."""
    telemetry_interval_s: PositiveFloat = 1.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of ``coordinator.log`` in the run directory."""
    retry_lost: int = Field(default=0, ge=0, le=10)
    """How often a lost round (its host or agent vanished) is repeated automatically; failed rounds are not."""
    cluster: ClusterOrFile = ClusterSpec()
    """A cluster, or the path of a cluster file relative to the run file."""
    cases: tuple[CaseRequest, ...] = Field(min_length=1)
