"""Settings of a training run, the same for every case."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from accelmark.spec.model import Spec

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Scalar = bool | int | float | str | None

TYPE_OF_PRECISION: Final = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What frameworks call the type that the matrix work of a precision is given in."""


def _off(given: object) -> object:
    """Read YAML's ``off`` as the word."""
    return "off" if given is False else given


def _checkpointing(given: object) -> object:
    """Read a truth value, as settings had before there was a choice."""
    return {True: "full", False: "off"}[given] if isinstance(given, bool) else given


class OptimizerSettings(Spec):
    """The optimizer; which of the numbers it reads depends on its name."""

    name: Literal["sgd", "adam", "adamw", "lamb"] = "sgd"
    lr: float = Field(default=0.1, ge=0)
    """Peak learning rate."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    decay_norm_and_bias: bool = True
    """Apply weight decay to one-dimensional parameters too."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    fused: bool | None = None
    """One kernel for all parameters; null lets the driver choose by device."""


class ScheduleSettings(Spec):
    """The learning rate over optimizer steps."""

    name: Literal["constant", "linear", "cosine", "onecycle", "step", "polynomial"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps; used when ``warmup_steps`` is 0."""
    final_lr_ratio: float = Field(default=0.0, ge=0)
    """Learning rate at the end over the peak."""
    power: float = 1.0
    """Exponent of the polynomial schedule."""
    step_epochs: int = Field(default=30, ge=1)
    """Epochs between drops of the step schedule."""
    step_gamma: float = 0.1


class EndSettings(Spec):
    """When training ends: whichever comes first. At least one bound has to be set."""

    at_target: bool = False
    """End at the first evaluation that reaches the target."""
    max_epochs: PositiveInt | None = None
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


class EvaluateSettings(Spec):
    """When the model is evaluated; it always is once more at the end unless the data is synthetic."""

    every_steps: PositiveInt | None = None
    every_epochs: PositiveInt | None = None
    max_batches: PositiveInt | None = None
    """Evaluate on this many batches only (marks the run, since the figure is then of a part)."""


class CheckpointSettings(Spec):
    """Checkpoints in the run directory, from which a run is resumed with the same loss."""

    every_steps: PositiveInt | None = None
    keep: PositiveInt = 1


class LoaderSettings(Spec):
    """How batches reach the device."""

    num_workers: int = Field(default=0, ge=0)
    prefetch: PositiveInt = 2
    pin_memory: bool | None = None
    """null: pinned where the device is not the CPU."""
    synthetic: bool = False
    """Made-up data of the right shapes: speed only, no accuracy; marks the run."""


class TrainSettings(Spec):
    """Everything about a training run that is a number or a choice."""

    batch_size: PositiveInt
    """Samples per device in one forward pass; the global batch is this x devices x accumulation."""
    eval_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 1
    precision: Precision = "fp32"
    """Precision of the matrix work: tf32 and fp32 keep fp32 weights, bf16 and fp16 autocast over them."""
    parallelism: Literal["ddp", "fsdp2"] = "ddp"
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], BeforeValidator(_off)] = "off"
    """Mode of the framework's compiler. A host that cannot compile trains without it, with a warning."""
    channels_last: bool = False
    activation_checkpointing: Annotated[Literal["off", "full", "selective"], BeforeValidator(_checkpointing)] = "off"
    """What the backward pass recomputes of each block: ``full`` all of it; ``selective`` all but matrix products and
    attention, whose outputs are kept. ``true`` and ``false`` mean ``full`` and ``off``."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Kernel of scaled dot-product attention that is tried first; ``auto`` leaves the choice to the framework."""
    gradient_clip_norm: PositiveFloat | None = None
    seed: int = Field(default=1, ge=0)
    """Seed of round 1; round N uses ``seed + N - 1``, and each rank derives its own."""
    threads: PositiveInt | None = None
    """CPU threads of a rank; null: cores of the host over its ranks."""
    log_every_steps: PositiveInt = 20
    """Optimizer steps in a window: losses and timings are read and logged when a window closes."""
    end: EndSettings
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    loader: LoaderSettings = LoaderSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    model: dict[str, Scalar] = Field(default_factory=dict)
    """The case's own numbers (width, depth, sequence length); ``case.yaml`` fixes their names and types."""
