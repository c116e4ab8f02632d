"""The events that the job side writes, and their values."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from accelmark.spec.model import Spec


class Event(StrEnum):
    """The names of events, in the order in which a run emits them first.

    All up to ``SUBMIT_INFO`` are FlagPerf's. ``STEP_END`` is written once for each window of optimizer steps, with
    arrays of per-step figures (``step_ms``, ``data_wait_ms``, ``losses``), so that logging adds no work to a step.
    """

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
    EVALUATE = "EVALUATE"
    EPOCH_END = "EPOCH_END"
    TRAIN_END = "TRAIN_END"
    FINISHED = "FINISHED"
    SUBMIT_INFO = "SUBMIT_INFO"
    CHECKPOINT = "CHECKPOINT"
    STAGE_BEGIN = "STAGE_BEGIN"
    STAGE_END = "STAGE_END"
    WARMUP = "WARMUP"
    FORWARD = "FORWARD"
    REPEAT_CHECK = "REPEAT_CHECK"
    INSPECTED = "INSPECTED"
    COMPILED = "COMPILED"
    EVALUATED = "EVALUATED"
    REPLAYED = "REPLAYED"
    SCENARIO = "SCENARIO"
    HEARTBEAT = "HEARTBEAT"
    WARNING = "WARNING"
    ERROR = "ERROR"


class StepWindow(Spec):
    """The value of ``STEP_END``: one window of optimizer steps, figures per step in arrays."""

    global_steps: int
    """Optimizer steps done when the window closed."""
    num_steps: int | None = None
    """Optimizer steps in the window; null: as many as ``losses`` has entries."""
    epoch: int
    num_trained_samples: int
    """Samples over all ranks when the window closed."""
    learning_rate: float | None
    loss: float | None
    """Mean loss of the window's last step on this rank; null where it is not finite."""
    losses: tuple[float | None, ...]
    """Of the window's last steps; an external trainer may print fewer than it takes."""
    step_ms: tuple[float, ...]
    """Computation of each step, by device events or the monotonic clock; empty where the framework times windows only.
    """
    data_wait_ms: tuple[float, ...]
    """Waiting for each step's batches."""
    wall_ms: float
    """From the window's opening to its closing, evaluation left out."""
    span_ms: float | None = None
    """From the start of the window's first step to the end of its last, by the clock of ``step_ms``: gaps between steps
    included. Unlike ``wall_ms`` it does not depend on how far the host runs ahead of the device."""


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
    """Whether the target was met."""


EndReason = Literal[
    "target", "max_epochs", "max_steps", "max_samples", "max_duration", "early_stop", "nonfinite_loss",
    "out_of_memory", "cancelled", "error", "evaluated",
]  # fmt: skip
"""``early_stop``: ended by the judge of a process that carries out many jobs; never by a job's own settings."""


class Finished(Spec):
    """The value of ``FINISHED``, the last event of every rank, however it ends. Times in seconds, names FlagPerf's."""

    state: Literal["completed", "failed", "cancelled"]
    end_reason: EndReason
    message: str | None = None
    """What happened and what to do, where the state is not ``completed``."""
    converged: bool | None
    """null where there is no target or the data was synthetic."""
    e2e_time: float
    """From the start of the rank's process."""
    init_time: float
    raw_train_time: float
    train_no_eval_time: float
    pure_training_computing_time: float
    global_steps: int
    num_trained_samples: int
    throughput_raw: float | None
    """Units per second over all ranks: whole, then without evaluation, then of computation alone."""
    throughput_no_eval: float | None
    throughput_pure_compute: float | None
    final_loss: float | None
    last_finite_loss_step: int | None = None
    final_metrics: dict[str, float | None]
    peak_device_memory_mib: float | None
    num_parameters: int
    flops_per_sample: float | None
    """Forward and backward, counted by the framework on the real model."""
    flops_per_sample_formula: float | None
    """The same by the case's own formula, as a check."""
    core_wait_s: float | None = None
    """Longest time that a runnable thread waited for a core; null where the kernel does not report it."""


class Started(Spec):
    """The value of ``INIT_END``: what really runs, as the framework reports it."""

    framework: str
    framework_version: str
    device_type: str
    device_name: str | None
    device_index: int | None
    world_size: int
    hostname: str
    threads: int
    seed: int
    precision: str
    model_class: str
    num_parameters: int
    parameter_hash: str
    """SHA-256 over names, shapes and dtypes of all parameters as the hooks left them: the structure of the model."""
    standard_parameter_hash: str | None = None
    """The same of the model as its case built it."""
    standard_num_parameters: int | None = None
    module_hash: str | None = None
    """SHA-256 over names, classes and settings of all modules as the hooks left them, those without parameters too."""
    standard_module_hash: str | None = None
    """The same of the model as its case built it."""
    replaced_modules: tuple[str, ...] = ()
    """Modules of another class or with other settings than the case's (``act: ReLU -> Identity``), the first few."""
    num_replaced_modules: int = 0
    replaced_functions: tuple[str, ...] = ()
    """Functions of the framework and of AccelMark's training that the vendor's code replaced in their module or class,
    or on an object; each with the place of the replacement."""
    module_functions: tuple[str, ...] = ()
    """Functions of the framework that ``framework_module`` replaced when it was imported, the first few."""
    num_module_functions: int = 0
    output_difference: float | None = None
    """Largest relative difference between what the vendor's model and the case's compute of the same synthetic samples;
    null where no code of a vendor's ran, the model is sharded, or it could not be computed."""
    checkpoint_hash: str | None
    """SHA-256 over the initial values of all parameters as the case built them (rank 0; null elsewhere)."""
    trained_checkpoint_hash: str | None = None
    """The same as the hooks left them, where a vendor's code ran (rank 0); a sharded model is gathered for it."""
    optimizer_class: str
    standard_optimizer_class: str | None = None
    """The optimizer that the case would build."""
    optimizer_changes: tuple[str, ...] = ()
    """Where the optimizer's numbers differ from those of the case's (``weight_decay: 0.01 -> 0.0``)."""
    compute_type: str | None = None
    """Type of the matrix work in a forward pass: autocast's where it is on, else the parameters'."""
    train_samples: int | None = None
    """Samples of an epoch over all ranks."""
    eval_samples: int | None = None
    """Samples of a whole evaluation over all ranks; null for synthetic data, which is not evaluated."""
    hooks: dict[str, str]
    """Overridden vendor hooks -> ``file:line``."""
    hook_lines: dict[str, int] = Field(default_factory=dict)
    """Overridden vendor hooks -> lines of code."""
    library_versions: dict[str, str]


class Inspected(Spec):
    """The value of ``INSPECTED``: what a rank saw of a vendor's code up to the end of training, if there was any."""

    replaced_functions: tuple[str, ...] = ()
    """As in :class:`Started`, looked for again when training had ended."""
    probed_steps: tuple[int, ...] = ()
    """Steps of this process that were looked at; drawn anew in each."""
    samples_credited: int | None = None
    """Samples that an optimizer step counts on a rank."""
    samples_seen: int | None = None
    """Fewest samples that went through the model's forward pass, in training, in any step that was looked at."""
    samples_reason: str | None = None
    """Why they could not be counted."""
    compute_types: tuple[str, ...] | None = None
    """Types of what the layers of matrix work gave in those steps."""
    compute_reason: str | None = None
    """Why none was recorded."""


class Evaluated(Spec):
    """The value of ``EVALUATED``: the metrics of given weights, by the case's own code without hooks of a vendor."""

    weights: str
    """Name of the checkpoint whose weights were evaluated."""
    metrics: dict[str, float | None]
    duration_s: float


class Replayed(Spec):
    """The value of ``REPLAYED``: optimizer steps repeated from a checkpoint without hooks of a vendor."""

    checkpoint: str
    first_step: int
    """Number of the first step that was replayed, from 1."""
    losses: tuple[float | None, ...]
    """Loss of each step on this rank."""
    update_norms: tuple[float | None, ...]
    """Euclidean norm of each step's change of all trainable parameters; of this rank's shards where sharded."""


class Compiled(Spec):
    """The value of ``COMPILED``: what the framework's compiler made of the model."""

    graphs: int
    """Graphs that were compiled; blocks of the same structure share one."""
    graph_breaks: int
    """Places where compiled code returns to the interpreter."""
