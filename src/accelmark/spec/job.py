"""``job.json``: the specification of one round with its kind of work, read by its processes on every host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Union

from pydantic import Field, PositiveFloat, PositiveInt
from typing_extensions import Self

from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from accelmark.spec.log.records import AdaptationFiles, Ceilings, HostClocks, LogSeal, ProbeItem
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import ReferenceLoss, Target, Unit
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.programs import ServerSpec, TrainerSpec
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.rules import RunRules
from accelmark.spec.settings.inference import Benchmark, InferPrecision, InferSettings, Note, Reference
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import Precision, Scalar, TrainSettings
from accelmark.spec.settings.tuning import TrialRole


class BaseWork(Spec):
    """Base class of all kinds of work."""

    rank_module: ClassVar[str]
    """Module that each rank runs: ``python -m <rank_module> job.json``."""
    is_single_process: ClassVar[bool] = False
    """Whether one rank uses all devices of its host; else the framework derives ranks from devices."""
    task: ClassVar[str] = ""
    unit: Unit = "sample"
    units_per_sample: int = 1
    min_repeats: int = Field(default=1, ge=1)

    @property
    def _settings(self) -> TrainSettings | InferSettings | ServeSettings | None:
        return getattr(self, "settings", None)

    @property
    def precision(self) -> Precision | InferPrecision:
        """Requested precision of matrix products."""
        return self._settings.precision if self._settings is not None else "fp32"

    @property
    def threads(self) -> int | None:
        """CPU threads of a rank; null: the framework chooses."""
        return self._settings.threads if self._settings is not None else None

    def for_round(self, number: int) -> Self:
        """Return the work of round ``number`` (from 1)."""
        return self


class TrainingWork(BaseWork):
    """Base class of training by AccelMark and by external trainers."""

    task: ClassVar[str] = "train"
    unit: Unit
    units_per_sample: int
    target: Target | None
    reference_loss: ReferenceLoss | None
    made_up_data: bool = False
    settings: TrainSettings

    def with_seed(self, seed: int) -> Self:
        """Return the work with another seed."""
        return self.model_copy(update={"settings": self.settings.model_copy(update={"seed": seed})})

    def for_round(self, number: int) -> Self:
        """Return the work of round ``number``: each round has its own seed."""
        return self.with_seed(self.settings.seed + number - 1)


class KilledRank(Spec):
    """A rank that kills itself, to measure how long a job takes to recover."""

    rank: int
    step: PositiveInt


class TrainJob(TrainingWork):
    """Train a case with AccelMark's own loop."""

    rank_module: ClassVar[str] = "accelmark.train.loop.rank"
    kind: Literal["train"] = "train"
    is_checked: bool = False
    """Whether weights are evaluated and steps replayed afterwards; synthetic: only steps, and only with hooks."""
    killed: KilledRank | None = None


class ExternalJob(TrainingWork):
    """Train a case with another project's trainer, whose output is translated into PerfLog events."""

    rank_module: ClassVar[str] = "accelmark.train.external.rank"
    kind: Literal["external"] = "external"
    trainer: TrainerSpec


class ReplayedPair(Spec):
    """Optimizer steps to replay, with the names of checkpoints."""

    start: str | None
    """null: from the case's initial weights."""
    end: str | None
    """Checkpoint that training wrote after these steps; null: only losses are compared."""
    first_step: PositiveInt
    num_steps: PositiveInt


class _OfTraining(BaseWork):
    rank_module: ClassVar[str] = "accelmark.train.loop.rank"
    train: TrainJob

    @property
    def _settings(self) -> TrainSettings:
        return self.train.settings


class EvaluateJob(_OfTraining):
    """Evaluate trained weights, replay steps from a checkpoint, or both, with the standard case and no vendor code."""

    kind: Literal["evaluate"] = "evaluate"
    weights: tuple[str, ...] = ()
    replays: tuple[ReplayedPair, ...] = ()
    others: tuple[ReplayedPair, ...] = ()
    """Candidates for one further replay: the pair in which the parameters moved much farther than in its neighbours."""
    draw: str = ""
    """The secret that drew these pairs: the coordinator chose it after the logs of the round had been sealed."""
    sha256: dict[str, str] = Field(default_factory=dict)
    """Hash of each of these checkpoints as training logged it (``train/loop/checkpoint_writer.py``)."""
    sha256_on_hosts: dict[int, dict[str, str]] = Field(default_factory=dict)
    """The same for checkpoints that a further host keeps itself, by the first rank of that host."""


class CompareJob(_OfTraining):
    """Take the first optimizer steps of a case from given weights on given batches, and record each step's results."""

    kind: Literal["compare"] = "compare"
    inputs: Path
    results: Path
    reference: Path | None = None
    """``results`` of the reference job, whose weights each step starts from; None: of itself, it writes ``inputs``."""
    num_steps: PositiveInt
    num_batches: PositiveInt
    """Batches of an optimizer step: each rank takes an equal share, and accumulates its gradients."""


class InferJob(BaseWork):
    """Run a trained model through an inference engine, in seven steps."""

    rank_module: ClassVar[str] = "accelmark.infer"
    is_single_process: ClassVar[bool] = True
    task: ClassVar[str] = "infer"
    kind: Literal["infer"] = "infer"
    unit: Unit
    metric: str
    metric_title: str = ""
    tolerance: float
    reference: Reference | None
    min_agreement: float = 0.0
    settings: InferSettings
    parameters: dict[str, Scalar]
    notes: tuple[Note, ...] = ()
    benchmarks: dict[Benchmark, Reference] = Field(default_factory=dict)
    generates: bool = False
    iterative: bool = False


class ServeJob(BaseWork):
    """Start a language model's server, or take a running one, and measure it under load."""

    rank_module: ClassVar[str] = "accelmark.serving"
    is_single_process: ClassVar[bool] = True
    task: ClassVar[str] = "serve"
    kind: Literal["serve"] = "serve"
    unit: Unit = "token"
    server: ServerSpec | None
    settings: ServeSettings
    min_agreement: float
    benchmarks: dict[Benchmark, Reference] = Field(default_factory=dict)


class ProbeJob(BaseWork):
    """Measure the peak rates of a device or a group of devices."""

    rank_module: ClassVar[str] = "accelmark.probe"
    kind: Literal["probe"] = "probe"
    items: tuple[ProbeItem, ...] = ("matmul", "memory", "copies", "collectives")
    budget_s: PositiveFloat = 60.0
    hosts: tuple[str, ...] = ()


Work = Annotated[
    Union[TrainJob, InferJob, EvaluateJob, CompareJob, ExternalJob, ServeJob, ProbeJob], Field(discriminator="kind")
]
"""The work of a job. Each kind has a planner in ``plan/`` and a reader in ``results/``."""


class JobSpec(Spec):
    """One round of one case. All ranks read the same file; each reads its number from the environment (``RANK``)."""

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
    vendor_environment: dict[str, str] = Field(default_factory=dict)
    collective_backend: str
    extern: FolderRef | None = None
    adaptation: AdaptationFiles | None = None
    ceilings: Ceilings | None = None
    """Rates that ``accelmark probe`` measured on this device; null if it was not probed."""
    chip: Chip | None = None
    data_dirs: dict[str, Path]
    """Data set name -> verified directory, the same path on every host."""
    checkpoint_dir: Path
    resume: bool = False
    seed: int | None = None
    """Seed that the coordinator drew when the round started, in place of the settings' seed; null: it drew none."""
    open: bool = False
    rules: RunRules | None = None
    role: TrialRole | None = None
    provenance: dict[str, Provenance] = Field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all hosts."""
        return self.key.nnodes * (self.ranks_per_host or self.key.nproc)

    @property
    def has_vendors_code(self) -> bool:
        """Whether ranks have code, packages or variables of the vendor's folder for this case, not just settings."""
        files = self.adaptation
        own = (files.extern, files.kernels, files.requirements, files.has_environment, files.has_build) if files else ()
        return self.extern is not None or any(own)

    @property
    def framework(self) -> str:
        """The framework that starts the ranks: the key's own, or the one that an external trainer runs on."""
        return self.work.trainer.framework if isinstance(self.work, ExternalJob) else self.key.framework


RankState = Literal["succeeded", "failed", "signaled", "timed_out", "stalled", "cancelled", "lost"]


class RankExit(Spec):
    """How one rank ended."""

    rank: int
    local_rank: int
    state: RankState
    exit_code: int | None
    signal: str | None = None
    reason: str | None = None
    lost_connection: bool = False
    """Whether that is an error that ranks raise after another rank has ended."""
    last_lines: tuple[str, ...] = ()


class LastCollective(Spec):
    """The last collective that a rank started in one process group."""

    group: str
    operation: str
    number: int
    state: str
    """``scheduled``, ``started`` or ``completed``, by the framework's recorder."""
    sizes: tuple[tuple[int, ...], ...] = ()


class LastCollectives(Spec):
    """A rank's answer to its agent's question for the last collectives."""

    collectives: tuple[LastCollective, ...]


class RankStall(Spec):
    """What a rank did when its job stalled."""

    rank: int
    pid: int | None
    process_state: str | None
    """One letter as in ``/proc/PID/stat``: ``R`` runs, ``S`` sleeps, ``D`` sleeps uninterruptibly, ``T`` is stopped."""
    waits_in: str | None
    """The kernel's function."""
    silent_s: float
    has_finished: bool
    last_step: int | None
    stack: tuple[str, ...] = ()
    """``FILE:LINE in FUNCTION`` of its main thread, innermost first; its log has the stacks of all threads."""
    collectives: tuple[LastCollective, ...] = ()
    """The last of each process group; empty where the framework records none, or the rank did not answer."""


class StallRecord(Spec):
    """What a host's ranks did when the job stalled, before they were ended."""

    ranks: tuple[RankStall, ...]
    full_file_systems: tuple[str, ...] = ()
    """Of shared memory, temporary files and the job's directory: those with no space left."""
    kernel_messages: tuple[str, ...] = ()
    kernel_problem: str | None = None


class NodeExit(Spec):
    """``exit.json``: how the job ended on one host. Written once, last, by its node agent."""

    schema_version: Literal[1] = 1
    host: str
    noderank: int
    state: Literal["succeeded", "failed", "timed_out", "lost", "cancelled"]
    reason: str | None
    started_at: str
    duration_s: float
    ranks: tuple[RankExit, ...]
    warnings: tuple[str, ...] = ()
    clocks: HostClocks | None = None
    logs: dict[int, LogSeal] = Field(default_factory=dict)
    """Each rank's log, where the ranks ended by themselves; pairs of checkpoints are drawn afterwards."""
    stall: StallRecord | None = None
    changed_data: tuple[str, ...] = ()
    changed_code: tuple[str, ...] = ()
    stale_bytecode: tuple[str, ...] = ()
    """Bytecode files of AccelMark, the case or the vendor that differ from their source but would be loaded."""
    others_cpu_s: float | None = None
    """CPU time of other processes on this host during the job; null where the kernel does not report it."""
