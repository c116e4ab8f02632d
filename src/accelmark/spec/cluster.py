"""A cluster file: the hosts, the launcher that starts jobs on them, and the container that ranks run in."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from accelmark.spec.model import FiniteSpec


class HostSpec(FiniteSpec):
    """One machine."""

    address: str = Field(min_length=1)
    """Host name or IP address."""
    label: str | None = None
    """Name in reports and directories; null: the address."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """SSH port; null: the cluster's."""
    user: str | None = None
    """SSH user; null: the cluster's."""
    key: Path | None = None
    """Private key file; null: the cluster's ``key``, else the default keys of ``ssh``."""
    interface: str | None = None
    """Network interface between ranks; null: the one that routes to host 0."""
    service_ports: tuple[int, ...] = ()
    """Ports for the framework's servers on this host (FlagPerf's HOSTS_PORTS); its launch gets the first."""

    @field_validator("address", "user")
    @classmethod
    def _is_no_option(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("-"):
            raise ValueError("begins with a dash")
        return value

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+", value) or re.fullmatch(r"[\d.]+", value):
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError("is no host name or IP address; user and port have keys of their own") from None
        return value

    @property
    def name(self) -> str:
        """Name of this host in directories, reports and errors."""
        return self.label or self.address


class ContainerEngine(NamedTuple):
    """What runs containers."""

    check: tuple[str, ...]
    """The command that succeeds on a host where it works."""
    lacks: tuple[str, ...] = ()
    """Settings of ``container`` that it has no option for."""
    ends_processes: bool = True
    """Whether it ends all processes of a container by the container's name; else the host's Python finds them."""
    is_tried: bool = True
    """Whether containers were run with it, not only commands generated from its documentation."""


CONTAINER_ENGINES: Final = {
    "docker": ContainerEngine(("docker", "info")),
    "podman": ContainerEngine(("podman", "info")),
    "apptainer": ContainerEngine(
        ("apptainer", "buildcfg"), ("image", "shm_size", "build_options", "privileged"), ends_processes=False
    ),
    "enroot": ContainerEngine(
        ("enroot", "version"), ("image", "shm_size", "build_options", "privileged"), ends_processes=False
    ),
    "pyxis": ContainerEngine(
        ("enroot", "version"), ("shm_size", "build_options", "privileged"), ends_processes=False, is_tried=False
    ),
}


class ContainerSpec(FiniteSpec):
    """The container that ranks run in."""

    engine: Literal["docker", "podman", "apptainer", "enroot", "pyxis"]
    """What runs containers on the hosts: a program, or Slurm's plug-in Pyxis with Enroot."""
    image: str | None = None
    """An image to use unchanged; null: build the vendor's image."""
    image_file: Path | None = None
    """An image archive on the hosts, loaded where ``image`` is missing; ``.sif`` and ``.sqsh`` files run unchanged."""
    shm_size: str | None = None
    """Size of ``/dev/shm`` as the engine takes it: ``16g``."""
    options: tuple[str, ...] = ()
    """Further options of the engine's ``run`` (``exec``, ``start`` or ``srun``), one argument each."""
    build_options: tuple[str, ...] = ()
    """Further options of the engine's ``build``, one argument each."""
    mounts: tuple[str, ...] = ()
    """``host path:container path[:ro]``, each one argument; no shell expands it."""
    privileged: bool = False
    """Run containers with all privileges."""
    pip_source: str | None = None
    """Package index for installations inside the container."""
    python: str = "python3"
    """The interpreter inside the image."""

    @model_validator(mode="after")
    def _engine_has_image(self) -> ContainerSpec:
        lacks = CONTAINER_ENGINES[self.engine].lacks
        if given := [name for name in lacks if getattr(self, name) not in (None, (), False)]:
            raise ValueError(f"engine {self.engine} has no {', '.join(given)}: remove it")
        has_image, has_file = self.image is not None, self.image_file is not None
        if "build_options" in lacks and has_image == has_file:
            raise ValueError(f"engine {self.engine} builds no image: name either image or image_file")
        if "build_options" not in lacks and has_file and not has_image:
            raise ValueError("image_file needs image: the name of the image in the archive")
        return self


def environment_python(path: Path) -> str:
    """Return the Python of a virtual environment."""
    return str(path / "bin" / "python")


class ClusterSpec(FiniteSpec):
    """Hosts, their launcher and the container of ranks; keys that are not declared here are launchers' settings."""

    model_config = ConfigDict(extra="allow")

    name: str = "local"
    """Name of the cluster in reports."""
    hosts: tuple[HostSpec, ...] = Field(default=(HostSpec(address="localhost"),), min_length=1)
    """The hosts of the run, in the order of their ranks; by default this machine."""
    spares: tuple[HostSpec, ...] = ()
    """Hosts that replace hosts which are not ready when a run starts, in this order."""
    launcher: str = "local"
    """Name of a launcher's folder."""
    vendor: str | None = None
    """Vendor of all hosts; null: this machine's vendor, where the hosts are this machine."""
    python: str = "python3"
    """Python interpreter on the hosts, which runs ranks without a container."""
    master_port: int = Field(default=29501, ge=1024, le=65535)
    """Port on host 0 where the ranks meet."""
    container: ContainerSpec | None = None
    environments: dict[str, Path] = Field(default_factory=dict)
    """Framework -> virtual environment on the hosts (``/opt/venv-jax``), in which its ranks run without a container."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank."""
    visible_devices_env: str | None = None
    """Replaces the vendor's variable that limits the devices visible to a rank."""
    clear_caches: bool = False
    """Drop the page cache before each round; needs root on the hosts."""
    min_disk_mib: NonNegativeInt = 1024
    """Least free disk space in the work directory that preflight accepts."""
    min_memory_mib: NonNegativeInt = 512
    """Least free memory that preflight accepts."""

    @field_validator("environments")
    @classmethod
    def _are_absolute(cls, value: dict[str, Path]) -> dict[str, Path]:
        if relative := [name for name, path in value.items() if not path.is_absolute()]:
            raise ValueError(f"not absolute: {', '.join(f'{name}: {value[name]}' for name in relative)}")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> ClusterSpec:
        hosts = (*self.hosts, *self.spares)
        names = [host.name for host in hosts]
        places = [host.address if host.port is None else f"{host.address}:{host.port}" for host in hosts]
        twice = {name for name in names if names.count(name) > 1} | {at for at in places if places.count(at) > 1}
        if twice:
            raise ValueError(f"duplicate hosts: {', '.join(sorted(twice))}")
        return self

    def environment_python(self, framework: str) -> str | None:
        """Return the Python of a framework's environment on the hosts; None where its ranks have none of their own."""
        path = self.environments.get(framework) if self.container is None else None
        return None if path is None else environment_python(path)

    @property
    def options(self) -> dict[str, Any]:
        """The settings of launchers, unchecked."""
        return dict(self.model_extra or {})
