"""Declaration of an external trainer (``trainer.yaml``): its command and the format of its output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from accelmark.spec.model import Spec
from accelmark.spec.parallelism import AXES
from accelmark.spec.plugins.vendor import Regex
from accelmark.spec.settings.training import Scalar

STEP_GROUPS: Final = (
    "step", "loss", "learning_rate", "step_time", "throughput", "samples", "tokens", "epoch",
)  # fmt: skip
"""Allowed named groups of ``log.step``."""
PLACEHOLDERS: Final = (
    "python", "rank", "local_rank", "world_size", "nnodes", "nproc", "model", "precision", "trainer_dir", "case_dir",
    "checkpoint_dir", "node_dir", "global_batch_size", *(f"mesh:{axis}" for axis in AXES),
)  # fmt: skip
"""Placeholders of a command template; more are ``data:<data set>``, ``setting:<dotted key>`` and ``env:<variable>``."""
_FREE: Final = ("data:", "setting:", "env:")
_PLACEHOLDER: Final = re.compile(r"\{([^{}\s]+)\}")


def placeholders(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in braces of a command template."""
    for argument in arguments:
        yield from _PLACEHOLDER.findall(argument)


def fill(arguments: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return the arguments with each ``{name}`` replaced, without a shell; raise KeyError if one has no value."""
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], argument) for argument in arguments]


class SettingFlag(Spec):
    """The arguments that pass one setting to the trainer; a plain list is read as ``arguments``."""

    arguments: tuple[str, ...] = ()
    """``{value}`` is replaced by the value. Omitted if the setting is null."""
    values: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """AccelMark's value (in YAML's notation) -> the trainer's value, or the whole list of arguments."""

    def render(self, value: Scalar) -> list[str]:
        """Return the arguments for ``value``."""
        if value is None:
            return []
        written = str(value).lower() if isinstance(value, bool) else str(value)
        word = self.values.get(written, written)
        if not isinstance(word, str):
            return list(word)
        return [argument.replace("{value}", word) for argument in self.arguments]


FlagOrArguments = Annotated[
    SettingFlag,
    BeforeValidator(
        lambda given: {"arguments": given} if isinstance(given, (list, tuple)) else given,
        json_schema_input_type=Union[SettingFlag, list[str]],
    ),
]


class LogSpec(Spec):
    """Regular expressions that are searched for in each line of the trainer's output to create events."""

    rank: Literal["first", "last"] = "first"
    """The rank whose output is read."""
    step: Regex
    """A line after one or more optimizer steps, with the group ``step`` and any of ``STEP_GROUPS``."""
    evaluation: Regex | None = None
    """A line after an evaluation: ``duration`` (seconds), ``step``; every other named group is a metric."""
    training_started: Regex | None = None
    """The line that training begins with; null: derived from the first step line and its ``step_time``."""

    @model_validator(mode="after")
    def _groups_are_known(self) -> LogSpec:
        groups = re.compile(self.step).groupindex
        if "step" not in groups:
            raise ValueError("log.step has no group (?P<step>...)")
        unknown = sorted(set(groups) - set(STEP_GROUPS))
        if unknown:
            raise ValueError(f"log.step has unknown groups {', '.join(unknown)} (known: {', '.join(STEP_GROUPS)})")
        return self

    def step_groups(self) -> frozenset[str]:
        """Return the named groups of ``step``."""
        return frozenset(re.compile(self.step).groupindex)


class LogUnits(Spec):
    """Units of the numbers in the trainer's output."""

    step_time: Literal["s", "ms"] = "s"
    """Unit of the printed step times."""
    throughput: Literal["all_ranks", "device"] = "all_ranks"
    """Scope of the printed throughput, which is only compared with AccelMark's own figure."""
    samples: Literal["all_ranks", "rank"] = "all_ranks"
    """Scope of the counts of samples and ``tokens`` since the beginning of training."""
    epoch_from: Literal[0, 1] = 0
    """Number of the first epoch."""


class TrainerSpec(Spec):
    """An external trainer."""

    name: str
    """Name in the framework part of a key."""
    title: str
    """The trainer's own spelling of its name."""
    framework: str
    """The framework that the trainer uses; its launch starts the ranks."""
    requires: tuple[str, ...] = ()
    """Requirements (``torchtitan>=0.2``)."""
    image: str | None = None
    """Container image with the trainer; null: the vendor's image for the framework."""
    command: tuple[str, ...] = Field(min_length=1)
    """Arguments of one rank's command, with placeholders in braces."""
    cases: dict[str, tuple[str, ...]] = Field(min_length=1)
    """Case -> further arguments. Other cases cannot be trained."""
    settings: dict[str, FlagOrArguments] = Field(default_factory=dict)
    """Dotted setting -> the arguments that pass it to the trainer."""
    parallelism: tuple[str, ...] = ()
    """Values of the setting ``parallelism``, names and axes of a mesh, that the placeholders ``mesh:AXIS`` pass on."""
    resume: tuple[str, ...] = ()
    """Further arguments to resume a round; if empty, the round starts from the beginning."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the ranks."""
    log: LogSpec
    units: LogUnits = LogUnits()

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> TrainerSpec:
        for part, arguments in {"command": self.command, "resume": self.resume, **self.cases}.items():
            for name in placeholders(arguments):
                if name not in PLACEHOLDERS and not name.startswith(_FREE):
                    known = ", ".join((*PLACEHOLDERS, "data:NAME", "setting:KEY", "env:VARIABLE"))
                    raise ValueError(f"{part} has the unknown placeholder {{{name}}} (known: {known})")
        return self

    def passes(self, setting: str) -> bool:
        """Return whether a dotted setting is passed to the trainer."""
        arguments = (*self.command, *(argument for more in self.cases.values() for argument in more))
        given = {name.partition(":")[0]: name for name in placeholders(arguments)}
        if setting == "parallelism":
            return "mesh" in given
        if setting == "gradient_accumulation_steps" and "global_batch_size" in given:
            return True
        return setting in self.settings or f"setting:{setting}" in placeholders(arguments)
