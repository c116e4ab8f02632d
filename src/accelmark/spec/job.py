"""``job.json``: the specification of one round, read by its processes on every host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from accelmark.spec.key import CaseKey
from accelmark.spec.model import Spec
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.records import AdaptationFiles, Ceilings
from accelmark.spec.work import ExternalJob, Work


class FolderRef(Spec):
    """Location of a case or vendor folder: an importable package or a directory."""

    name: str
    path: Path
    package: str | None = None
    """The package of the folder (``accelmark.cases.resnet_mini``); null for a loose directory."""
    sha256: str
    """Hash over the folder's files."""


class Provenance(Spec):
    """Which layer gave a setting its value, and what it replaced, weakest first."""

    value: Any
    layer: str
    replaced: tuple[tuple[str, Any], ...] = ()
    """(layer, value) of the weaker layers."""
    forced: bool = False
    """True where an open run changed an immutable setting."""


class JobSpec(Spec):
    """One round of one case, as the job side reads it.

    It is the same for every rank; a rank reads its place from the environment (``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``ACCELMARK_NODE_DIR``).
    """

    schema_version: Literal[2] = 2
    work: Work
    key: CaseKey
    ranks_per_host: int | None = Field(default=None, ge=1)
    """Ranks that the framework runs on each host; null: one per device."""
    round: int = Field(ge=1)
    case: FolderRef
    case_version: int
    vendor: str
    device_type: str
    """The framework's name of the vendor's devices (``cuda``, ``npu``, ``cpu``)."""
    framework_module: str | None
    """Module that registers the device with the framework when it is imported."""
    vendor_environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank from ``vendor.yaml``."""
    collective_backend: str
    extern: FolderRef | None = None
    """The vendor's folder for this case, if it overrides hooks."""
    adaptation: AdaptationFiles | None = None
    """Contents of the vendor's folder for this case; null without one."""
    ceilings: Ceilings | None = None
    """Rates that ``accelmark probe`` measured on this device; null if it was not probed."""
    chip: Chip | None = None
    """The chip under test as its vendor describes it; null if unknown (then MFU is null)."""
    data_dirs: dict[str, Path]
    """Data set name -> verified directory, the same path on every host."""
    checkpoint_dir: Path
    resume: bool = False
    """Resume from the newest checkpoint in ``checkpoint_dir`` if there is one."""
    open: bool = False
    provenance: dict[str, Provenance] = Field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all hosts."""
        return self.key.nnodes * (self.ranks_per_host or self.key.nproc)

    @property
    def framework(self) -> str:
        """The framework that starts the ranks: the key's own, or the one that an external trainer runs on."""
        return framework_of(self.work, self.key)

    @model_validator(mode="before")
    @classmethod
    def _upgraded(cls, values: Any) -> Any:
        return upgrade_job(values) if isinstance(values, dict) and values.get("schema_version") == 1 else values


def framework_of(work: Work, key: CaseKey) -> str:
    """Return the framework that starts the ranks of ``work``."""
    return work.trainer.framework if isinstance(work, ExternalJob) else key.framework


def upgrade_job(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a ``job.json`` of schema version 1 (without kinds of work) to version 2."""
    upgraded = {key: value for key, value in values.items() if key not in ("task", "train", "infer")}
    kind = values.get("task", "train")
    upgraded["schema_version"] = 2
    upgraded["work"] = {"kind": kind} | (values.get(kind) or {})
    upgraded["collective_backend"] = upgraded.pop("distributed_backend", "")
    return upgraded


RankState = Literal["succeeded", "failed", "signaled", "timed_out", "stalled", "cancelled", "lost"]


class RankExit(Spec):
    """How one rank ended, as its node saw it."""

    rank: int
    local_rank: int
    state: RankState
    exit_code: int | None
    signal: str | None = None
    reason: str | None = None
    """One line with the cause: the exception, the signal, the limit."""
    last_lines: tuple[str, ...] = ()


class NodeExit(Spec):
    """``exit.json``: how the job ended on one host. Written once, last, by its node agent."""

    schema_version: Literal[1] = 1
    host: str
    noderank: int
    state: Literal["succeeded", "failed", "timed_out", "lost", "cancelled"]
    reason: str | None
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    ranks: tuple[RankExit, ...]
    warnings: tuple[str, ...] = ()
    """Problems that did not end the job, for example a telemetry recorder that died."""
    others_cpu_s: float | None = None
    """CPU time of other processes on this host during the job; null where the kernel does not report it."""
