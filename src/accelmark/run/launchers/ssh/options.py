"""Settings that the SSH launcher adds to a cluster file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field, PositiveFloat, field_validator

from accelmark.spec.cluster import HostSpec
from accelmark.spec.plugins.launcher import LauncherOptions

KEEPALIVES: Final = 3
"""After this number of checks without an answer, an open connection is lost."""


class Options(LauncherOptions):
    """Settings of the SSH launcher; ``user`` and ``key`` apply to hosts without these keys."""

    ssh_port: int = Field(default=22, ge=1, le=65535)
    """Port of SSH on hosts without ``port``."""
    user: str | None = None
    """null: the user who runs this."""
    key: Path | None = None
    """Private key file; null: the keys that ``ssh`` would use."""
    known_hosts: Path | None = None
    """File of known host keys; ``~/.ssh/known_hosts`` when null. Keys are always checked."""
    ssh_config: Path | None = None
    """Configuration file of OpenSSH's client; null: ``~/.ssh/config``."""
    work_directory: Path = Path("/var/tmp/accelmark")  # noqa: S108  preflight refuses one of another user
    """Where AccelMark keeps its files on each host."""
    shared_directory: Path | None = None
    """A directory that is shared by all hosts; null: nothing is shared.

    A run directory below it is written by the hosts directly, without copies.
    """
    reconnect_s: PositiveFloat = 300.0
    """Longest time that a host may be unreachable before its job is lost."""
    abandon_s: PositiveFloat = 86400.0
    """Longest time that a node agent continues its job without a heartbeat of a coordinator."""
    keep_days: PositiveFloat = 14.0
    """A later run removes files of ended runs from the hosts' work directory at this age."""

    @property
    def ping_s(self) -> float:
        """Interval between checks of an open connection; after three unanswered checks it is lost."""
        return min(5.0, self.reconnect_s / KEEPALIVES)

    @field_validator("work_directory", "shared_directory")
    @classmethod
    def _is_absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @field_validator("known_hosts", "ssh_config")
    @classmethod
    def _expand_user(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    def port_of(self, host: HostSpec) -> int:
        """Return the SSH port of a host."""
        return host.port if host.port is not None else self.ssh_port

    def user_of(self, host: HostSpec) -> str | None:
        """Return the user to log in as; None leaves it to SSH's configuration."""
        return host.user or self.user

    def key_of(self, host: HostSpec) -> Path | None:
        """Return the private key file for a host; None leaves it to SSH's configuration."""
        key = host.key or self.key
        return key.expanduser() if key is not None else None

    def host_problems(self, hosts: Sequence[HostSpec]) -> Iterator[str]:
        """Yield each address and port that two hosts share."""
        places = [f"{host.address}:{self.port_of(host)}" for host in hosts]
        yield from (f"duplicate host {place}" for place in dict.fromkeys(places) if places.count(place) > 1)
