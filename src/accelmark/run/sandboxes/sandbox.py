"""Sandboxes: how a module of AccelMark is started on a host, natively or in a container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, final
from urllib.parse import urlsplit

from accelmark.plan.plan import Plan
from accelmark.run.agent.host import DROP_CACHES, DROP_CACHES_VARIABLE
from accelmark.run.sandboxes.image import ImageRecipe, recipe_of
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.spec.plugins.vendor import VendorSpec

_ENTER: Final = "accelmark/run/sandboxes/enter.sh"
"""Installs the packages that the agent lacks before it starts; relative to the code."""
_DROP_CACHES_INSIDE: Final = "/run/accelmark-drop-caches"
"""Where the host's drop_caches file is mounted: the container's own is read-only."""


@final
@dataclass(frozen=True, slots=True)
class ModuleCommand:
    """A module of AccelMark to run in a sandbox, and what it needs there."""

    module: str
    """Argument of ``python -m``."""
    arguments: tuple[str, ...]
    name: str
    """Unique on its host."""
    environment: Mapping[str, str]
    writable: Sequence[Path] = ()
    """Directories that it writes to; they have the same paths inside."""
    readable: Sequence[Path] = ()


class Sandbox:
    """The environment that the node agent, its recorder and its ranks run in: here, the host itself."""

    def __init__(self) -> None:
        self.image: ImageRecipe | None = None
        """The image that it needs on a host."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the arguments that run ``inside`` on a host; ``python`` is the host's own."""
        variables = [f"{name}={value}" for name, value in inside.environment.items()]
        return ["env", *variables, python, "-m", inside.module, *inside.arguments]

    def removal(self, name: str) -> list[str] | None:
        """Return the command that ends and removes the sandbox ``name``; None for processes of the host itself."""
        return None

    def image_commands(self) -> list[list[str]]:
        """Return the commands that look for the image, and obtain it where it is absent."""
        return [] if self.image is None else [self.image.present, self.image.make]


@final
@dataclass
class ContainerSandbox(Sandbox):
    """Runs commands in a container on the host's network; it is removed when they end."""

    spec: ContainerSpec
    vendor: VendorSpec
    """Declares what its devices need."""
    image: ImageRecipe
    code: PurePosixPath
    """Where AccelMark is on the host, mounted at the same path."""
    clear_caches: bool = False
    """Whether the agent drops the host's page cache."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the engine's command; the host's ``python`` is not used."""
        spec, defaults = self.spec, self.vendor.container
        command = [spec.engine, "run", "--rm", "--name", inside.name, "--network", "host", "--ipc"]
        command += ["private", "--shm-size", spec.shm_size] if spec.shm_size else ["host"]
        command += ["--privileged"] if spec.privileged else []
        command += [*defaults.options, *spec.options]
        volumes = [*defaults.mounts, *spec.mounts]
        mounted = [mount.split(":")[0] for mount in volumes]
        places = dict.fromkeys(str(path) for path in inside.writable)
        writable = [path for path in places if not _is_below(path, [other for other in places if other != path])]
        readable = dict.fromkeys([str(self.code), *(str(path) for path in inside.readable)])
        volumes += [f"{path}:{path}" for path in writable]
        volumes += [f"{path}:{path}:ro" for path in readable if not _is_below(path, [*mounted, *writable])]
        environment = {**defaults.environment, **inside.environment, **_pip_variables(spec.pip_source)}
        if self.clear_caches:
            volumes.append(f"{DROP_CACHES}:{_DROP_CACHES_INSIDE}")
            environment[DROP_CACHES_VARIABLE] = _DROP_CACHES_INSIDE
        for volume in volumes:
            command += ["--volume", volume]
        for name, value in environment.items():
            command += ["--env", f"{name}={value}"]
        command += ["--entrypoint", "sh", self.image.name, str(self.code / _ENTER), spec.python]
        return [*command, "-m", inside.module, *inside.arguments]

    def removal(self, name: str) -> list[str]:
        """Return the command that ends and removes the container."""
        return [self.spec.engine, "rm", "--force", name]


def _pip_variables(source: str | None) -> dict[str, str]:
    """Return pip's variables for a package index; one without TLS is trusted because the cluster file names it."""
    if source is None:
        return {}
    parts = urlsplit(source)
    trusted = {"PIP_TRUSTED_HOST": parts.netloc.rpartition("@")[2]} if parts.scheme == "http" else {}
    return {"PIP_INDEX_URL": source, **trusted}


def _is_below(path: str, places: list[str]) -> bool:
    return any(Path(path).is_relative_to(place) for place in places)


def job_sandbox(plan: Plan, job: JobSpec, code: PurePosixPath, vendor_dir: Path) -> Sandbox:
    """Return the sandbox of a job, with the paths of AccelMark and of the vendor's folder on the hosts."""
    image = recipe_of(plan, job, vendor_dir)
    if plan.cluster.container is None or image is None:
        return Sandbox()
    return ContainerSandbox(plan.cluster.container, load_vendor(plan.vendor), image, code, plan.cluster.clear_caches)


def model_files(job: JobSpec) -> tuple[Path, ...]:
    """Return the files that an inference job names by absolute path; containers have to mount them."""
    if not isinstance(job.work, InferJob):
        return ()
    named = (job.work.settings.exist_onnx_path, job.work.settings.exist_compiler_path)
    return tuple(Path(name) for name in named if name is not None and Path(name).is_absolute())
