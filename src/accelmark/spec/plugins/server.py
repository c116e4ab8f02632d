"""Declaration of a server of language models (``server.yaml``): its command, health and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from accelmark.spec.errors import nearest
from accelmark.spec.model import Spec
from accelmark.spec.plugins.trainer import FlagOrArguments, fill, placeholders
from accelmark.spec.settings.training import Scalar

PLACEHOLDERS: Final = ("python", "model_dir", "host", "port", "device", "num_devices", "node_dir", "precision")
"""Placeholders of a server's commands."""
REQUEST_PLACEHOLDER: Final = "{output_tokens}"
"""In ``pinned``: the requested number of tokens, as a number."""
_OPTION: Final = "server_options."
_SETTINGS: Final = ("precision", "threads")
"""Settings of a run that a server may take as arguments, in addition to its options."""


ServerFact = Literal["quantisation", "kv_cache_type", "speculative_decoding"]


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
    facts: dict[ServerFact, str] = Field(default_factory=dict)
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
        for where, command in (("prepare", self.prepare), ("command", self.command)):
            for name in placeholders(command):
                if name not in PLACEHOLDERS:
                    what = f"{where} has the unknown placeholder {{{name}}}"
                    raise ValueError(f"{what} (known: {', '.join(PLACEHOLDERS)})")
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
