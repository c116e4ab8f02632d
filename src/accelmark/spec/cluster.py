"""A cluster: which hosts there are, how to reach them, and what ranks run in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from accelmark.spec.model import Spec


class HostSpec(Spec):
    """One machine."""

    address: str
    """Name or address; ``localhost`` is this machine without SSH."""
    label: str | None = None
    """The name in reports and directories; the address when null."""
    port: int = Field(default=22, ge=1, le=65535)
    user: str | None = None
    key: Path | None = None
    """Private key file."""

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
    """An archive that the image is loaded from where it is absent."""
    shm_size: str | None = None
    options: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    pip_source: str | None = None


class ClusterSpec(Spec):
    """Hosts, how jobs are launched on them, and the sandbox they run in."""

    name: str = "local"
    hosts: tuple[HostSpec, ...] = (HostSpec(address="localhost"),)
    launcher: Literal["local", "ssh", "slurm"] = "local"
    vendor: str | None = None
    """Vendor of all hosts; null detects it."""
    master_port: int = Field(default=29501, ge=1024, le=65535)
    container: ContainerSpec | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    clear_caches: bool = False
    shared_directory: Path | None = None
    """A directory all hosts see; null: nothing is shared and AccelMark carries files itself."""

    @model_validator(mode="after")
    def _distinct(self) -> ClusterSpec:
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"hosts stand twice: {', '.join(twice)}")
        return self
