"""Another project's trainer: how its ranks are started, and how its output is read (``trainer.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from accelmark.spec.model import Spec
from accelmark.spec.plugins.vendor import compiled
from accelmark.spec.settings import Scalar

STEP_GROUPS: Final = (
    "step", "loss", "learning_rate", "step_time", "throughput", "samples", "tokens", "epoch",
)  # fmt: skip
"""Named groups of ``log.step``."""
PLACEHOLDERS: Final = (
    "python", "rank", "local_rank", "world_size", "nnodes", "nproc", "model", "precision", "trainer_dir", "case_dir",
    "checkpoint_dir", "node_dir",
)  # fmt: skip
"""Names that a command template may use in braces, besides ``data:<data set>`` and ``setting:<dotted key>``."""
_PLACEHOLDER: Final = re.compile(r"\{([^{}\s]+)\}")
_MAX_PATTERN_CHARACTERS: Final = 1000


def placeholders(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in braces of a command template."""
    for argument in arguments:
        yield from _PLACEHOLDER.findall(argument)


def fill(arguments: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return the arguments with each ``{name}`` replaced; no shell reads them.

    Raises:
        KeyError: a name has no value.
    """
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], argument) for argument in arguments]


class SettingFlag(Spec):
    """The arguments that pass one setting to the trainer; a list alone is ``arguments``."""

    arguments: tuple[str, ...] = ()
    """``{value}`` stands for the value. Left out where the setting is null."""
    values: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """AccelMark's value (as YAML writes it) -> the trainer's word, or the whole list of arguments."""

    @model_validator(mode="before")
    @classmethod
    def _arguments_alone(cls, given: Any) -> Any:
        return {"arguments": given} if isinstance(given, list | tuple) else given

    def render(self, value: Scalar) -> list[str]:
        """Return the arguments for ``value``."""
        if value is None:
            return []
        written = str(value).lower() if isinstance(value, bool) else str(value)
        word = self.values.get(written, written)
        if not isinstance(word, str):
            return list(word)
        return [argument.replace("{value}", word) for argument in self.arguments]


class LogSpec(Spec):
    """How lines of the trainer's output become events: regular expressions that are searched for in each line."""

    rank: Literal["first", "last"] = "first"
    """The rank whose output counts."""
    step: str
    """A line after one or several optimizer steps, with the group ``step`` and any of ``STEP_GROUPS``."""
    evaluation: str | None = None
    """A line after an evaluation: ``duration`` (seconds), ``step``; every other named group is a metric."""
    training_started: str | None = None
    """The line at which training begins; null: derived from the first step line and its ``step_time``."""

    @field_validator("step", "evaluation", "training_started")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if len(value) > _MAX_PATTERN_CHARACTERS:
            raise ValueError(f"is longer than {_MAX_PATTERN_CHARACTERS} characters")
        return compiled(value)

    @model_validator(mode="after")
    def _groups_are_known(self) -> LogSpec:
        groups = re.compile(self.step).groupindex
        if "step" not in groups:
            raise ValueError("log.step has no group (?P<step>...)")
        unknown = sorted(set(groups) - set(STEP_GROUPS))
        if unknown:
            raise ValueError(f"log.step has unknown groups {', '.join(unknown)} (known: {', '.join(STEP_GROUPS)})")
        return self

    def evaluation_groups(self) -> frozenset[str]:
        """Return the named groups of ``evaluation``."""
        return frozenset(re.compile(self.evaluation or "").groupindex)

    def step_groups(self) -> frozenset[str]:
        """Return the named groups of ``step``."""
        return frozenset(re.compile(self.step).groupindex)


class LogUnits(Spec):
    """Units of the numbers in the trainer's output."""

    step_time: Literal["s", "ms"] = "s"
    throughput: Literal["all_ranks", "device"] = "all_ranks"
    """Whose units per second are printed; only compared with AccelMark's own figure."""
    samples: Literal["all_ranks", "rank"] = "all_ranks"
    """Whose samples (and ``tokens``) are counted, from the beginning of training."""
    epoch_from: Literal[0, 1] = 0
    """Number of the first epoch."""


class TrainerSpec(Spec):
    """An external trainer."""

    name: str
    """The name that stands in the framework part of a key."""
    title: str
    framework: str
    """The framework that the trainer runs on, whose launch starts its ranks."""
    requires: tuple[str, ...] = ()
    """Packages that it needs, as requirements (``torchtitan>=0.2``)."""
    image: str | None = None
    """Container image with the trainer; null: the vendor's image for the framework."""
    command: tuple[str, ...] = Field(min_length=1)
    """The command of one rank, an argument each, with placeholders in braces."""
    cases: dict[str, tuple[str, ...]] = Field(min_length=1)
    """Case -> further arguments for it. Other cases cannot be trained."""
    settings: dict[str, SettingFlag] = Field(default_factory=dict)
    """Dotted setting -> the arguments that pass it on."""
    resume: tuple[str, ...] = ()
    """Further arguments where a round is resumed; without any, it starts from the beginning."""
    environment: dict[str, str] = Field(default_factory=dict)
    log: LogSpec
    units: LogUnits = LogUnits()

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> TrainerSpec:
        for part, arguments in {"command": self.command, "resume": self.resume, **self.cases}.items():
            for name in placeholders(arguments):
                if name not in PLACEHOLDERS and not name.startswith(("data:", "setting:")):
                    known = ", ".join((*PLACEHOLDERS, "data:NAME", "setting:KEY"))
                    raise ValueError(f"{part} has the unknown placeholder {{{name}}} (known: {known})")
        return self

    def passes(self, setting: str) -> bool:
        """Return whether the trainer is given a dotted setting."""
        arguments = (*self.command, *(argument for more in self.cases.values() for argument in more))
        return setting in self.settings or f"setting:{setting}" in placeholders(arguments)
