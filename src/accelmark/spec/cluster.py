"""A cluster: which hosts there are, how to reach them, and what ranks run in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from accelmark.spec.model import Spec


class HostSpec(Spec):
    """One machine."""

    address: str = Field(min_length=1)
    """Name or address; ``launcher: local`` takes this machine's only."""
    label: str | None = None
    """The name in reports and directories; the address when null."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """SSH port; the cluster's ``ssh_port`` when null."""
    user: str | None = None
    key: Path | None = None
    """Private key file; the cluster's ``key``, else those that ``ssh`` finds, when null."""
    interface: str | None = None
    """Network interface that ranks talk through; found from the address of host 0 when null."""
    service_ports: tuple[int, ...] = ()
    """Ports for servers of the framework on each host (FlagPerf's HOSTS_PORTS). The framework's launch gets the first
    of each host; preflight checks that all are free."""

    @field_validator("address", "user")
    @classmethod
    def _is_no_option(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("-"):
            raise ValueError("begins with a dash")
        return value

    @property
    def name(self) -> str:
        """What this host is called in directories, reports and errors."""
        return self.label or self.address


class ContainerSpec(Spec):
    """The container that ranks run in; absent, they run natively."""

    engine: Literal["docker", "podman"]
    image: str | None = None
    """An image to use as it is; null builds the vendor's own."""
    image_file: Path | None = None
    """An archive on the hosts that ``image`` is loaded from where it is absent."""
    shm_size: str | None = None
    options: tuple[str, ...] = ()
    """Further options of the engine's ``run``, one argument each."""
    build_options: tuple[str, ...] = ()
    """Further options of the engine's ``build``, one argument each."""
    mounts: tuple[str, ...] = ()
    """``host path:container path[:ro]``, each an argument of its own, so that no shell reads it."""
    privileged: bool = False
    pip_source: str | None = None
    """Package index for installs inside the container."""
    python: str = "python3"
    """The interpreter inside the image."""

    @model_validator(mode="after")
    def _file_has_name(self) -> ContainerSpec:
        if self.image_file is not None and self.image is None:
            raise ValueError("image_file needs image: the name that the archive's image bears")
        return self


class ClusterSpec(Spec):
    """Hosts, how jobs are launched on them, and the sandbox they run in."""

    name: str = "local"
    hosts: tuple[HostSpec, ...] = Field(default=(HostSpec(address="localhost"),), min_length=1)
    launcher: Literal["local", "ssh", "slurm"] = "local"
    vendor: str | None = None
    """Vendor of all hosts; null detects it."""
    ssh_port: int = Field(default=22, ge=1, le=65535)
    user: str | None = None
    """SSH user of hosts that name none; null is the user who runs this."""
    key: Path | None = None
    """Private key file for hosts that name none."""
    known_hosts: Path | None = None
    """File of known host keys; ``~/.ssh/known_hosts`` when null. Keys are always checked."""
    python: str = "python3"
    """The Python of the hosts: what ranks run with natively."""
    work_directory: Path = Path("/var/tmp/accelmark")  # noqa: S108  preflight refuses one of another user
    """Where AccelMark keeps its files on each host."""
    master_port: int = Field(default=29501, ge=1024, le=65535)
    container: ContainerSpec | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    visible_devices_env: str | None = None
    """Replaces the vendor's variable that narrows the devices a rank sees."""
    clear_caches: bool = False
    """Drop the page cache before each round; needs root on the hosts."""
    shared_directory: Path | None = None
    """A directory all hosts see; null: nothing is shared and AccelMark carries files itself.

    A run whose own directory lies below it is written there by the hosts themselves.
    """
    reconnect_s: PositiveFloat = 300.0
    """Longest time that a host may be out of reach before its job counts as lost."""
    abandon_s: PositiveFloat = 86400.0
    """Longest time that an agent on a host goes on with its job while no coordinator asks after it (SSH)."""
    slurm_options: tuple[str, ...] = ()
    """Options of ``salloc`` where no allocation is there yet (``--partition=gpu``)."""
    min_disk_mib: NonNegativeInt = 1024
    """Least free disk space in the work directory that preflight accepts."""
    min_memory_mib: NonNegativeInt = 512
    """Least free memory that preflight accepts."""

    @field_validator("environment")
    @classmethod
    def _names_are_names(cls, value: dict[str, str]) -> dict[str, str]:
        bad = [name for name in value if not name or "=" in name or "\0" in name]
        if bad:
            raise ValueError(f"not names of variables: {', '.join(map(repr, bad))}")
        return value

    @field_validator("work_directory", "shared_directory")
    @classmethod
    def _is_absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("has to be an absolute path")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> ClusterSpec:
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        places = [(host.address, host.port or self.ssh_port) for host in self.hosts]
        twice += sorted({f"{address}:{port}" for address, port in places if places.count((address, port)) > 1})
        if twice:
            raise ValueError(f"hosts stand twice: {', '.join(dict.fromkeys(twice))}")
        if self.launcher == "local" and len(self.hosts) > 1:
            raise ValueError("several hosts need launcher: ssh or slurm")
        return self

    def port_of(self, host: HostSpec) -> int:
        """Return the SSH port of a host."""
        return host.port if host.port is not None else self.ssh_port
