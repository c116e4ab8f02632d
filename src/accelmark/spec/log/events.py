"""The events that the job side writes, and the values of those of training."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from accelmark.spec.backports import StrEnum
from accelmark.spec.model import Spec


class Event(StrEnum):
    """Names of events, in the order of their first occurrence in a run; all up to ``SUBMIT_INFO`` are FlagPerf's."""

    INIT_START = "INIT_START"
    INIT_END = "INIT_END"
    LAUNCH_TRAINING = "LAUNCH_TRAINING"
    CONVERT_MODEL = "CONVERT_MODEL"
    CREATE_OPTIMIZER = "CREATE_OPTIMIZER"
    MODEL_TO_FP16 = "MODEL_TO_FP16"
    MODEL_TO_DDP = "MODEL_TO_DDP"
    INIT_EVALUATION = "INIT_EVALUATION"
    TRAIN_START = "TRAIN_START"
    EPOCH_BEGIN = "EPOCH_BEGIN"
    STEP_BEGIN = "STEP_BEGIN"
    BACKWARD = "BACKWARD"
    STEP_END = "STEP_END"
    STEP_TRACED = "STEP_TRACED"
    EVALUATE = "EVALUATE"
    EPOCH_END = "EPOCH_END"
    TRAIN_END = "TRAIN_END"
    FINISHED = "FINISHED"
    SUBMIT_INFO = "SUBMIT_INFO"
    CHECKPOINT = "CHECKPOINT"
    CHECKPOINTS_HASHED = "CHECKPOINTS_HASHED"
    STAGE_BEGIN = "STAGE_BEGIN"
    STAGE_END = "STAGE_END"
    WARMUP = "WARMUP"
    FORWARD = "FORWARD"
    REPEAT_CHECK = "REPEAT_CHECK"
    ANSWER_CHECK = "ANSWER_CHECK"
    COMPILED = "COMPILED"
    EVALUATED = "EVALUATED"
    REPLAYED = "REPLAYED"
    DATA_READ = "DATA_READ"
    SCENARIO = "SCENARIO"
    TOKEN_SCENARIO = "TOKEN_SCENARIO"  # noqa: S105 - no password
    LOAD_BEGIN = "LOAD_BEGIN"
    LOAD_END = "LOAD_END"
    HEARTBEAT = "HEARTBEAT"
    WARNING = "WARNING"
    BAD_SAMPLE = "BAD_SAMPLE"
    ERROR = "ERROR"


class StepWindow(Spec):
    """The value of ``STEP_END``: one window of optimizer steps, with arrays of per-step figures."""

    global_steps: int
    num_steps: int | None = None
    """Optimizer steps in the window; null: the length of ``losses``."""
    epoch: int
    num_trained_samples: int
    """Over all ranks."""
    learning_rate: float | None
    loss: float | None
    """Mean loss of the window's last step on this rank; null where it is not finite."""
    losses: tuple[float | None, ...]
    """Losses of the window's last steps; an external trainer may print only some of them."""
    step_ms: tuple[float, ...]
    """Computation of each step, by device events or the monotonic clock; empty if the framework times windows only."""
    data_wait_ms: tuple[float, ...]
    own_ms: tuple[float, ...] = ()
    """Part of ``step_ms`` up to this rank's last gradient, before it waits for others; empty if not known."""
    wall_ms: float
    """Duration of the window without evaluation."""
    cpu_ms: float | None = None
    """CPU time of this process; null of external trainers."""
    span_ms: float | None = None
    """From the start of the first step to the end of the last, gaps included, by the clock of ``step_ms``."""
    gc_ms: float = 0.0
    """Python's garbage collections since the window before was written."""
    alloc_retries: int = 0
    """Times that the device's allocator had to free its cache since the last window with a slow step."""


class TracedStep(Spec):
    """The value of ``STEP_TRACED``: a step with its collectives, where the framework times windows of steps only."""

    step_ms: float
    own_ms: float
    """The step without its collectives, in which the rank waits for others."""


class Evaluation(Spec):
    """The value of ``EVALUATE``."""

    global_steps: int
    epoch: int
    num_trained_samples: int
    metrics: dict[str, float | None]
    duration_s: float
    elapsed_s: float
    """Raw training time when the evaluation ended."""
    reached: bool


EndReason = Literal[
    "target", "max_epochs", "max_steps", "max_samples", "max_duration", "early_stop", "nonfinite_loss",
    "out_of_memory", "cancelled", "error", "evaluated",
]  # fmt: skip
"""``early_stop``: stopped by the process that runs many jobs, not by the job's own settings."""


class FinishedBase(Spec):
    """What the values of ``FINISHED``, the last event of every rank, have in common. Names are FlagPerf's."""

    state: Literal["completed", "failed", "cancelled"]
    message: str | None = None
    """Cause and remedy if the state is not ``completed``."""
    e2e_time: float
    """Seconds from the start of the rank's process."""
    core_wait_s: float | None = None
    """Longest time that a runnable thread waited for a core; null where the kernel does not report it."""


class Finished(FinishedBase):
    """The value of ``FINISHED`` of training, however it ends. Times in seconds."""

    end_reason: EndReason
    converged: bool | None
    """Whether the target was reached; null without one or with synthetic data."""
    init_time: float
    raw_train_time: float
    train_no_eval_time: float
    pure_training_computing_time: float
    global_steps: int
    num_trained_samples: int
    throughput_raw: float | None
    """Units per second over all ranks: in total, then without evaluation, then for computation only."""
    throughput_no_eval: float | None
    throughput_pure_compute: float | None
    final_loss: float | None
    last_finite_loss_step: int | None = None
    final_metrics: dict[str, float | None]
    peak_device_memory_mib: float | None
    num_parameters: int
    flops_per_sample: float | None
    """Forward and backward pass, counted by the framework on the real model."""
    flops_per_sample_formula: float | None
    """The same by the case's formula."""


class StartedBase(Spec):
    """What the values of ``INIT_END`` have in common: versions, device and settings as the framework reports them."""

    framework: str
    framework_version: str
    device_type: str
    device_name: str | None
    hostname: str
    threads: int
    precision: str
    library_versions: dict[str, str]


class Started(StartedBase):
    """The value of ``INIT_END`` of training, with the model as the framework reports it."""

    device_index: int | None
    world_size: int
    seed: int
    model_class: str
    num_parameters: int
    parameter_hash: str
    """SHA-256 over names, shapes and dtypes of all parameters as the hooks left them: the structure of the model."""
    standard_parameter_hash: str | None = None
    """The same of the model as its case built it."""
    standard_module_hash: str | None = None
    """SHA-256 over names, classes and settings of all modules of the model as its case built it."""
    reduced_modes: tuple[str, ...] = ()
    """Switches of the framework that are set to a lower precision than declared when training starts."""
    checkpoint_hash: str | None
    """SHA-256 over the initial values of all parameters as the case built them (rank 0; null elsewhere)."""
    optimizer_class: str
    standard_optimizer_class: str | None = None
    compute_type: str | None = None
    """Data type of matrix products in the forward pass: autocast's if enabled, else the parameters'."""
    attention_kernels: tuple[str, ...] = ()
    """Kernels that the framework chooses for scaled dot-product attention; empty where it does not say."""
    train_samples: int | None = None
    eval_samples: int | None = None
    hooks: dict[str, str]
    """Overridden vendor hooks -> ``file:line``."""
    hook_lines: dict[str, int] = Field(default_factory=dict)
    init_cpu_s: float | None = None
    """CPU time of the process, its threads and the children that ended, until it was ready to train."""
    own_part_unknown: str | None = None
    """Why the own part of the steps of several ranks is not known, where it is not."""


class Evaluated(Spec):
    """The value of ``EVALUATED``: the metrics of given weights, by the case's code without vendor hooks."""

    weights: str
    metrics: dict[str, float | None]
    duration_s: float


class UpdateSquares(Spec):
    """Squared Euclidean norms over all trainable parameters (of this rank's shards if sharded)."""

    replayed: float
    """Of the change of the parameters by the replayed steps."""
    saved: float
    """Of their change by the same steps in training."""
    difference: float

    @property
    def norms(self) -> float:
        """Norm of the saved change over the norm of the replayed one; infinite where the latter is 0."""
        return math.sqrt(self.saved / self.replayed) if self.replayed else math.inf

    @property
    def relative_difference(self) -> float:
        """Norm of the difference over the norm of the replayed change; where the latter is 0, the norm itself."""
        return math.sqrt(self.difference / self.replayed if self.replayed else self.difference)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 0 where one is 0."""
        product = math.sqrt(self.saved * self.replayed)
        return (self.saved + self.replayed - self.difference) / (2 * product) if product else 0.0

    def __add__(self, other: UpdateSquares) -> UpdateSquares:
        """Return the sums of two ranks."""
        return UpdateSquares(**{name: value + getattr(other, name) for name, value in self})


class Replayed(Spec):
    """The value of ``REPLAYED``: optimizer steps repeated without vendor hooks."""

    checkpoint: str | None
    """Checkpoint from which they were repeated; null: from the initial weights."""
    end: str | None = None
    """Checkpoint that the weights were compared with; null: only losses are compared."""
    first_step: int
    losses: tuple[float | None, ...]
    update: UpdateSquares | None = None
    state: dict[str, UpdateSquares] = Field(default_factory=dict)
    """The same of the values of ``buffers`` and of each kind of the optimizer's state; empty without ``end``."""


class DataRead(Spec):
    """The value of ``DATA_READ``: contents of the files that an evaluation or inference read on this rank."""

    sample: dict[str, dict[str, str]]
    """Data -> ``<file>@<offset>`` -> SHA-256 of up to 1 MiB from there, at places drawn when all was read."""


class SavedCheckpoint(Spec):
    """The value of ``CHECKPOINT``."""

    name: str
    global_steps: int
    duration_s: float
    """Until training continues."""
    background_s: float | None = None
    """How long a thread wrote while training went on; null: training waited for all of it."""
    num_bytes: int | None = None


class CheckpointHashes(Spec):
    """The value of ``CHECKPOINTS_HASHED``: the checkpoints that are left when training has ended."""

    sha256: dict[str, str]
    steps: dict[str, int] = Field(default_factory=dict)
    """Name -> optimizer steps done, including checkpoints of earlier attempts."""
    pairs: tuple[tuple[str | None, str], ...]
    """Checkpoints between which steps can be replayed, in order; null: the initial weights."""
    claimed: str | None = None
    """The checkpoint of the first evaluation that reached the target."""
    final: str | None = None
    num_bytes: int
    duration_s: float
    reason: str | None = None


class Compiled(Spec):
    """The value of ``COMPILED``: statistics of the framework's compiler."""

    graphs: int
    """Blocks of the same structure share one."""
    graph_breaks: int
