"""Settings of a training run, the same for every case."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Optional, Union

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from accelmark.spec.model import FiniteSpec
from accelmark.spec.parallelism import Mesh, Parallelism

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Compile = Literal["off", "default", "reduce-overhead", "max-autotune"]
Checkpointing = Literal["off", "full", "selective"]
Scalar = Optional[Union[bool, int, float, str]]

TYPE_OF_PRECISION: Final = {
    "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn",
}  # fmt: skip
"""Precision -> the frameworks' name of the input type of matrix products."""


def _switch(given: object) -> object:
    """Convert a boolean, as YAML has it, to the mode."""
    return {True: "full", False: "off"}[given] if isinstance(given, bool) else given


class OptimizerSettings(FiniteSpec):
    """The optimizer; its name determines which of the numbers it uses."""

    name: Literal["sgd", "adam", "adamw", "lamb", "adagrad"] = "sgd"
    """Algorithm."""
    lr: float = Field(default=0.1, ge=0)
    """Peak learning rate."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov's momentum (SGD)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay; decoupled in AdamW and LAMB."""
    decay_norm_and_bias: bool = True
    """Also apply weight decay to one-dimensional parameters."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the gradient's mean (Adam, AdamW, LAMB)."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the squared gradient's mean (Adam, AdamW, LAMB)."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator (Adam, AdamW, LAMB, Adagrad)."""
    fused: bool | None = None
    """Use one kernel for all parameters; null: the driver chooses by device."""

    @model_validator(mode="after")
    def _possible(self) -> OptimizerSettings:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


NEEDED_NAME: Final = {
    "optimizer.momentum": ("sgd",), "optimizer.nesterov": ("sgd",),
    "optimizer.beta1": ("adam", "adamw", "lamb"), "optimizer.beta2": ("adam", "adamw", "lamb"),
    "optimizer.eps": ("adam", "adamw", "lamb", "adagrad"),
    "schedule.final_lr_ratio": ("linear", "cosine", "onecycle", "polynomial", "tri_stage"),
    "schedule.power": ("polynomial",), "schedule.step_epochs": ("step",), "schedule.step_gamma": ("step",),
}  # fmt: skip
"""Setting -> the values of ``name`` in its section that it applies to; other settings apply to every name."""


class ScheduleSettings(FiniteSpec):
    """The learning rate over optimizer steps."""

    name: Literal["constant", "linear", "cosine", "onecycle", "step", "polynomial", "inverse_sqrt", "tri_stage"] = (
        "constant"
    )
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps; used when ``warmup_steps`` is 0."""
    final_lr_ratio: float = Field(default=0.0, ge=0)
    """Final learning rate as a share of the peak."""
    power: float = 1.0
    """Exponent of the polynomial schedule."""
    step_epochs: int = Field(default=30, ge=1)
    """Epochs between drops of the step schedule."""
    step_gamma: float = 0.1
    """Factor of each drop of the step schedule."""

    @model_validator(mode="after")
    def _falls(self) -> ScheduleSettings:
        if self.name == "tri_stage" and self.final_lr_ratio == 0:
            raise ValueError("tri_stage falls exponentially to final_lr_ratio, which must be greater than 0")
        return self


class EndSettings(FiniteSpec):
    """Bounds of training: the first that is reached ends it. At least one must be set."""

    at_target: bool = False
    """End at the first evaluation that reaches the target."""
    max_epochs: PositiveInt | None = None
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    max_samples: PositiveInt | None = None
    """Samples over all ranks."""
    max_duration_s: PositiveFloat | None = None
    """Seconds of raw training time."""

    @model_validator(mode="after")
    def _bounded(self) -> EndSettings:
        if self.max_epochs is self.max_steps is self.max_samples is self.max_duration_s is None:
            raise ValueError("no bound is set; give max_epochs, max_steps, max_samples or max_duration_s")
        return self


class EvaluateSettings(FiniteSpec):
    """When the model is evaluated, in addition to the evaluation at the end; synthetic data is not evaluated."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between evaluations; null: not by steps."""
    every_epochs: PositiveInt | None = None
    """Epochs between evaluations; null: not by epochs."""
    max_batches: PositiveInt | None = None
    """Evaluate on this many batches only (marks the run)."""


class CheckpointSettings(FiniteSpec):
    """Checkpoints in the run directory, from which a run resumes with the same loss."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints to resume from, besides those for the replay; null: only those."""
    keep: PositiveInt = 1
    """Number of checkpoints kept; older ones are deleted."""
    asynchronous: bool = False
    """Continue training while one checkpoint is written, from a copy in host memory."""
    replay_mib: int = Field(default=512, ge=0)
    """Disk space of a round for checkpoints between which steps are replayed; 0: none, and the result is OPEN."""
    replay_all: bool = False
    """Replay between all checkpoints, not only 128 drawn steps: takes up to as long as training itself."""


class LoaderSettings(FiniteSpec):
    """How batches reach the device."""

    num_workers: int = Field(default=0, ge=0)
    """Worker processes per rank that read data; 0: the rank reads it itself."""
    prefetch: PositiveInt = 2
    """Batches that each worker process reads ahead, and that are copied ahead to a device that is not the CPU."""
    pin_memory: bool | None = None
    """Pin memory; null: unless the device is the CPU."""
    synthetic: bool = False
    """Use synthetic data of the same shapes: speed only, no accuracy (marks the run)."""
    tolerate_bad_samples: int = Field(default=0, ge=0)
    """Unreadable training samples that each rank names and skips, if data is read by sample (marks the run)."""


_ZERO_3_ONLY: Final = (
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)  # fmt: skip
_ZERO_1_AND_2_ONLY: Final = ("allgather_bucket_size", "round_robin_gradients")


class ZeroSettings(FiniteSpec):
    """DeepSpeed's ZeRO (arXiv:1910.02054), by the names in its configuration; null: its default."""

    stage: Literal[1, 2, 3] = 3
    """Ranks share the optimizer state (1), also the gradients (2), also the parameters (3)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory: optimizer state, which the host then updates, or also parameters (stage 3)."""
    overlap_comm: bool | None = None
    """Exchange gradients during the backward pass."""
    contiguous_gradients: bool | None = None
    """Copy gradients to one buffer as they are computed."""
    round_robin_gradients: bool | None = None
    """Spread the copying of gradients to host memory over ranks (stages 1 and 2)."""
    reduce_bucket_size: PositiveInt | None = None
    """Elements that are reduced at once."""
    allgather_bucket_size: PositiveInt | None = None
    """Elements that are gathered at once (stages 1 and 2)."""
    sub_group_size: PositiveInt | None = None
    """Elements that the optimizer updates at once (stage 3)."""
    stage3_prefetch_bucket_size: int | None = Field(default=None, ge=0)
    """Elements that are gathered ahead."""
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0)
    """Parameters with fewer elements stay gathered."""
    stage3_max_live_parameters: PositiveInt | None = None
    """Largest number of parameters that are gathered at a time."""
    stage3_max_reuse_distance: int | None = Field(default=None, ge=0)
    """Parameters that are used again within so many others stay gathered."""

    @model_validator(mode="after")
    def _possible(self) -> ZeroSettings:
        if self.offload == "all" and self.stage != 3:
            raise ValueError(f"offload all needs stage 3, found stage {self.stage}; or use offload optimizer")
        for name in _ZERO_3_ONLY if self.stage < 3 else _ZERO_1_AND_2_ONLY:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect in stage {self.stage}; leave it null")
        return self


class PipelineSettings(FiniteSpec):
    """The pipeline of a mesh with ``pp``, used with it only."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Forward and backward passes in turn (arXiv:2104.04473), or all forward passes first (arXiv:1811.06965)."""
    microbatches: PositiveInt | None = None
    """Parts of a batch that pass through the stages in turn; null: the fewest that give each stage one in a step."""


class TrainSettings(FiniteSpec):
    """All settings of a training run."""

    batch_size: PositiveInt
    """Samples in one forward pass of a device, or of the devices that share a model's layers (tp, pp, cp)."""
    eval_batch_size: PositiveInt = 256
    """Samples per device in one batch of an evaluation."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches per optimizer step on each device."""
    precision: Precision = "fp32"
    """Precision of matrix products; weights are fp32. fp8: linear layers of repeated blocks, all else as with bf16."""
    parallelism: Parallelism = "ddp"
    """How the model is spread over the ranks: ``ddp`` replicates it, ``fsdp2`` shards it over all ranks, ``hsdp`` over
    those of each host, ``deepspeed`` by ``zero``, a mesh such as ``{fsdp: 4, tp: 2}`` by its axes dp, fsdp, tp, pp, cp,
    ep; see docs/reference/parallelism.md."""
    zero: ZeroSettings = ZeroSettings()
    pipeline: PipelineSettings = PipelineSettings()
    compile: Annotated[Compile, BeforeValidator(_switch, json_schema_input_type=Compile | Literal[False])] = "off"
    """Mode of the framework's compiler. Hosts that cannot compile train without it, with a warning."""
    channels_last: bool = False
    """Store images and convolution weights as NHWC."""
    activation_checkpointing: Annotated[
        Checkpointing, BeforeValidator(_switch, json_schema_input_type=Checkpointing | bool)
    ] = "off"
    """Recomputation in the backward pass: ``full`` of a block, ``selective`` but matrix products and attention."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Preferred kernel of scaled dot-product attention; ``auto``: the framework chooses."""
    gradient_clip_norm: PositiveFloat | None = None
    """Clip gradients to this global L2 norm; null: not at all."""
    seed: int = Field(default=1, ge=0)
    """Seed of round 1; round N uses ``seed + N - 1``, and each rank derives a seed from it."""
    threads: PositiveInt | None = None
    """CPU threads per rank; null: cores of the host divided by its ranks."""
    log_every_steps: PositiveInt = 20
    """Optimizer steps per window; losses and timings are read and logged at the end of a window."""
    end: EndSettings
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    loader: LoaderSettings = LoaderSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    model: dict[str, Scalar] = Field(default_factory=dict)
    """Parameters of the case (width, depth, sequence length); ``case.yaml`` defines their names and types."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the model or of the optimizer's state."""
        return self.parallelism != "ddp"

    @property
    def has_shards(self) -> bool:
        """Whether the framework itself shards parameters, which a checkpoint then holds in parts."""
        return self.is_sharded and self.parallelism != "deepspeed"

    def num_data_ranks(self, num_ranks: int) -> int:
        """Return how many of ``num_ranks`` ranks, or groups of them, train on different samples."""
        return num_ranks // (self.parallelism.ranks_per_sample if isinstance(self.parallelism, Mesh) else 1)

    def microbatches_that_fit(self, stages: int) -> list[int]:
        """Return into how many parts of equal size a batch can be divided, so that a step has one for each stage."""
        sizes = range(1, self.batch_size + 1)
        return [n for n in sizes if self.batch_size % n == 0 and n * self.gradient_accumulation_steps >= stages]

    def microbatches(self, stages: int) -> int:
        """Return the parts of a batch in a pipeline of ``stages``; planning has checked that there are enough."""
        return self.pipeline.microbatches or self.microbatches_that_fit(stages)[0]

    def samples_per_step(self, num_ranks: int) -> int:
        """Return the global batch: samples of an optimizer step over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * self.num_data_ranks(num_ranks)
