"""Declarations of programs that AccelMark starts: external trainers (``trainer.yaml``), servers (``server.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from accelmark.spec.errors import nearest
from accelmark.spec.model import Spec
from accelmark.spec.parallelism import AXES
from accelmark.spec.plugins.vendor import Regex
from accelmark.spec.settings.training import Scalar

STEP_GROUPS: Final = (
    "step", "loss", "learning_rate", "step_time", "throughput", "samples", "tokens", "epoch",
)  # fmt: skip
"""Allowed named groups of ``log.step``."""
TRAINER_PLACEHOLDERS: Final = (
    "python", "rank", "local_rank", "world_size", "nnodes", "nproc", "model", "precision", "trainer_dir", "case_dir",
    "checkpoint_dir", "node_dir", "global_batch_size", *(f"mesh:{axis}" for axis in AXES),
)  # fmt: skip
"""Placeholders of trainers' commands; more are ``data:<data set>``, ``setting:<dotted key>`` and ``env:<variable>``."""
_FREE: Final = ("data:", "setting:", "env:")
SERVER_PLACEHOLDERS: Final = ("python", "model_dir", "host", "port", "device", "num_devices", "node_dir", "precision")
"""Placeholders of a server's commands."""
_PLACEHOLDER: Final = re.compile(r"\{([^{}\s]+)\}")


def placeholders(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in braces of a command template."""
    for argument in arguments:
        yield from _PLACEHOLDER.findall(argument)


def fill(arguments: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return the arguments with each ``{name}`` replaced, without a shell; raise KeyError if one has no value."""
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], argument) for argument in arguments]


def _check_placeholders(parts: Mapping[str, tuple[str, ...]], known: tuple[str, ...], free: tuple[str, ...]) -> None:
    for part, arguments in parts.items():
        for name in placeholders(arguments):
            if name not in known and not name.startswith(free):
                listed = ", ".join((*known, *(f"{prefix}NAME" for prefix in free)))
                raise ValueError(f"{part} has the unknown placeholder {{{name}}} (known: {listed})")


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
        if "step" not in self.step_groups():
            raise ValueError("log.step has no group (?P<step>...)")
        if unknown := sorted(self.step_groups().difference(STEP_GROUPS)):
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
        _check_placeholders({"command": self.command, "resume": self.resume, **self.cases}, TRAINER_PLACEHOLDERS, _FREE)
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


REQUEST_PLACEHOLDER: Final = "{output_tokens}"
"""In ``pinned``: the requested number of tokens, as a number."""
_OPTION: Final = "server_options."
_SETTINGS: Final = ("precision", "threads")
"""Settings of a run that a server may take as arguments, in addition to its options."""


class ServerAdaptation(Spec):
    """What a vendor adds to a server (``vendors/<vendor>/servers/<server>.yaml``), for all cases."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Option of the server -> value on the vendor's chips."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server."""
    requires: tuple[str, ...] = ()
    """Further requirements to install."""


class ServerSpec(Spec):
    """A server with the OpenAI-compatible API of streamed completions."""

    name: str
    """Name of the folder; ``accelmark serve --server NAME``."""
    title: str
    tried: str | None
    """Version and machine that this declaration was run with; null: it only follows the server's documentation."""
    prepare: tuple[str, ...] = ()
    """Program and arguments that convert the model before the server starts; placeholders as in ``command``."""
    command: tuple[str, ...]
    """Program and arguments; placeholders in braces."""
    flags: dict[str, FlagOrArguments] = Field(default_factory=dict)
    """Setting of a run (``precision``, ``threads``) or option (``server_options.NAME``) -> arguments."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Option -> default; null: the server's own. Every option has an entry in ``flags``."""
    facts: dict[Literal["quantisation", "kv_cache_type", "speculative_decoding"], str] = Field(default_factory=dict)
    """What results state about the server -> the option that sets it."""
    health: str = "/health"
    """Path that answers with status 200 as soon as requests are served."""
    served_model: str = "{model_dir}"
    """Model name in requests."""
    api_path: str = "/v1"
    """Path of the API: requests go to ``<api_path>/completions`` and ``<api_path>/chat/completions``."""
    apis: tuple[str, ...] = ("completions", "chat")
    request: dict[str, Any] = Field(default_factory=dict)
    """Fields of every request, such as those without which the server's decoding is not greedy."""
    pinned: dict[str, Any] = Field(default_factory=dict)
    """Fields of a request that pin the length of its answer; ``"{output_tokens}"`` is replaced by the number."""
    can_pin: bool = True
    """Whether the length of answers can be pinned; if not, requests that want it are refused."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""
    distribution: str | None = None
    """Python package whose version is the server's."""
    version_command: tuple[str, ...] = ()
    """Command that prints the version of a server that is not a Python package."""
    requires: tuple[str, ...] = ()
    """Requirements to install, as pip takes them."""
    max_devices: int | None = None
    """Greatest number of devices of one server; null: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> ServerSpec:
        _check_placeholders({"prepare": self.prepare, "command": self.command}, SERVER_PLACEHOLDERS, ())
        for key in self.flags:
            option = key.removeprefix(_OPTION)
            if key not in _SETTINGS and (option == key or option not in self.options):
                hint = nearest(key, (*_SETTINGS, *(f"{_OPTION}{name}" for name in self.options)))
                raise ValueError(f"flags names {key!r}, which is neither a setting nor an option ({hint})")
        if without := [name for name in self.options if f"{_OPTION}{name}" not in self.flags]:
            raise ValueError(f"flags has no entry for the option {without[0]!r}")
        if wrong := [option for option in self.facts.values() if option not in self.options]:
            raise ValueError(f"facts names {wrong[0]!r}, which is no option ({nearest(wrong[0], self.options)})")
        return self

    def uses(self, num_devices: int) -> bool:
        """Return whether one server can use so many devices."""
        return self.max_devices is None or num_devices <= self.max_devices

    def adapted(self, adaptation: ServerAdaptation) -> ServerSpec:
        """Return this declaration with a vendor's additions, without its options, which are a layer of settings."""
        environment, requires = self.environment | adaptation.environment, (*self.requires, *adaptation.requires)
        return self.model_copy(update={"environment": environment, "requires": requires})

    def arguments(self, values: Mapping[str, str], settings: Mapping[str, Scalar]) -> list[str]:
        """Return the command with its placeholders replaced, and the flags of ``settings`` or of options' defaults."""
        given = {f"{_OPTION}{name}": value for name, value in self.options.items()} | dict(settings)
        flags = (flag.render(given.get(key)) for key, flag in self.flags.items())
        return [*fill(self.command, values), *(argument for passed in flags for argument in passed)]
