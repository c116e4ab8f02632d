"""Declaration of a server of language models (``server.yaml``): its command, health and options."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from accelmark.spec.model import Spec
from accelmark.spec.plugins.trainer import SettingFlag

PLACEHOLDERS: Final = ("python", "model_dir", "host", "port", "num_devices", "node_dir")
"""Placeholders of a server's command."""
REQUEST_PLACEHOLDER: Final = "{output_tokens}"
"""In ``pinned``: the requested number of tokens, as a number."""


class ServerSpec(Spec):
    """A server with the OpenAI-compatible API (``/v1/completions`` or ``/v1/chat/completions``, streamed)."""

    name: str
    """Name of the folder; ``accelmark serve --server NAME``."""
    title: str
    command: tuple[str, ...]
    """Program and arguments; placeholders in braces."""
    flags: dict[str, SettingFlag] = Field(default_factory=dict)
    """Setting of a run (``precision``, ``threads``) or option (``server_options.NAME``) -> arguments."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Option -> default; null: the server's own. Every option has an entry in ``flags``."""
    health: str = "/health"
    """Path that answers with status 200 as soon as requests are served."""
    served_model: str = "{model_dir}"
    """Model name in requests."""
    apis: tuple[str, ...] = ("completions", "chat")
    pinned: dict[str, Any] = Field(default_factory=dict)
    """Fields of a request that pin the length of its answer; ``"{output_tokens}"`` is replaced by the number."""
    can_pin: bool = True
    """Whether the length of answers can be pinned."""
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
