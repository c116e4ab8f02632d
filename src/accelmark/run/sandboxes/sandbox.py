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
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.plugins.vendor import VendorSpec

_ENTER: Final = "accelmark/run/sandboxes/enter.sh"
"""Installs the packages that the agent lacks before it starts; relative to the code."""
_DROP_CACHES_INSIDE: Final = "/run/accelmark-drop-caches"
"""Where the host's drop_caches file is mounted: the container's own is read-only."""


@final
@dataclass(frozen=True)
class ModuleCommand:
    """A module of AccelMark to run in a sandbox, and its needs there."""

    module: str
    """Argument of :func:`module_command`."""
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
        return ["env", *variables, *module_command(python, inside.module, *inside.arguments)]

    def step_options(self, inside: ModuleCommand) -> list[str]:
        """Return the options of the ``srun`` whose step runs ``inside``; empty where the command enters the sandbox."""
        return []

    def clean_up(self, python: str, ending: ModuleCommand) -> list[str]:
        """Return the command that ends the processes of ``ending.name`` on a host, by the module ``ending``."""
        return self.command(python, ending)

    def image_commands(self) -> list[list[str]]:
        """Return the commands that look for the image, and obtain it where it is absent."""
        return [] if self.image is None else [argv for argv in (self.image.present, self.image.make) if argv]


@dataclass
class ContainerSandbox(Sandbox):
    """Runs commands in a container of Docker or Podman on the host's network; it is removed when they end."""

    spec: ContainerSpec
    vendor: VendorSpec
    """Declares the needs of its devices."""
    image: ImageRecipe | None
    code: PurePosixPath
    """Where AccelMark is on the host, mounted at the same path."""
    clear_caches: bool = False
    """Whether the agent drops the host's page cache."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the engine's command; the host's ``python`` is not used."""
        spec = self.spec
        assert self.image is not None  # noqa: S101  these engines always have one
        command = [spec.engine, "run", "--rm", "--name", inside.name, "--network", "host", "--ipc"]
        command += ["private", "--shm-size", spec.shm_size] if spec.shm_size else ["host"]
        command += ["--privileged"] if spec.privileged else []
        command += [*self.vendor.container.options, *spec.options]
        for volume in self.volumes(inside):
            command += ["--volume", volume]
        for name, value in self.variables(inside).items():
            command += ["--env", f"{name}={value}"]
        return [*command, "--entrypoint", "sh", self.image.name, *self.entered(inside)]

    def volumes(self, inside: ModuleCommand) -> list[str]:
        """Return the mounts, each as ``host path:container path[:ro]``."""
        volumes = [*self.vendor.container.mounts, *self.spec.mounts]
        mounted = [mount.split(":")[0] for mount in volumes]
        places = dict.fromkeys(str(path) for path in inside.writable)
        writable = [path for path in places if not _is_below(path, [other for other in places if other != path])]
        readable = dict.fromkeys([str(self.code), *(str(path) for path in inside.readable)])
        volumes += [f"{path}:{path}" for path in writable]
        volumes += [f"{path}:{path}:ro" for path in readable if not _is_below(path, [*mounted, *writable])]
        return [*volumes, f"{DROP_CACHES}:{_DROP_CACHES_INSIDE}"] if self.clear_caches else volumes

    def variables(self, inside: ModuleCommand) -> dict[str, str]:
        """Return the environment variables of the container."""
        dropping = {DROP_CACHES_VARIABLE: _DROP_CACHES_INSIDE} if self.clear_caches else {}
        pip = _pip_variables(self.spec.pip_source)
        return {**self.vendor.container.environment, **inside.environment, **pip, **dropping}

    def entered(self, inside: ModuleCommand) -> list[str]:
        """Return the arguments of the container's ``sh`` that run ``inside``."""
        return [str(self.code / _ENTER), *module_command(self.spec.python, inside.module, *inside.arguments)]

    def with_variables(self, inside: ModuleCommand) -> list[str]:
        """Return the command, in a container that is there already, that sets the variables and runs ``inside``."""
        variables = [f"{name}={value}" for name, value in self.variables(inside).items()]
        return ["env", *variables, "sh", *self.entered(inside)]

    def clean_up(self, python: str, ending: ModuleCommand) -> list[str]:
        """Return the command that removes the container, or ends its processes on the host."""
        if self.spec.engine in _SANDBOXES:
            return Sandbox().command(python, ending)
        return [self.spec.engine, "rm", "--force", ending.name]


@final
class ApptainerSandbox(ContainerSandbox):
    """Runs commands in an image file by Apptainer, without the host's environment and home directory."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the command; the host's ``python`` is not used."""
        command = ["apptainer", "exec", "--cleanenv", "--no-home"]
        command += [*self.vendor.container.apptainer_options, *self.spec.options]
        for volume in self.volumes(inside):
            command += ["--bind", volume]
        return [*command, str(self.spec.image_file), *self.with_variables(inside)]


@final
class EnrootSandbox(ContainerSandbox):
    """Runs commands in an image file by Enroot, whose changes stay in memory, without the host's environment and home.

    Its hooks read the variables that it is given: NVIDIA's opens the devices that ``NVIDIA_VISIBLE_DEVICES`` names.
    """

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the command (Enroot's ``doc/cmd/start.md``); the host's ``python`` is not used."""
        script, *arguments = self.entered(inside)
        command = ["enroot", "start", "--rw", "--rc", script, *self.spec.options]
        for volume in self.volumes(inside):
            source, target, *read_only = volume.split(":")
            command += ["--mount", ":".join([source, target, "none", ",".join(["x-create=auto", "rbind", *read_only])])]
        for name, value in {"container": "enroot", **self.variables(inside)}.items():
            command += ["--env", f"{name}={value}"]
        return [*command, str(self.spec.image_file), *arguments]


@final
class PyxisSandbox(ContainerSandbox):
    """Commands of a step of Slurm whose container Pyxis makes, by Enroot, before the step starts."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the command inside the container of the step."""
        return self.with_variables(inside)

    def step_options(self, inside: ModuleCommand) -> list[str]:
        """Return Pyxis's options of ``srun`` (https://github.com/NVIDIA/pyxis, ``args.c``)."""
        options = [
            f"--container-image={self.spec.image_file or self.spec.image}",
            f"--container-mounts={','.join(self.volumes(inside))}",
            "--no-container-mount-home",
            "--container-writable",
        ]
        return [*options, *self.spec.options]


_SANDBOXES: Final[dict[str, type[ContainerSandbox]]] = {
    "apptainer": ApptainerSandbox,
    "enroot": EnrootSandbox,
    "pyxis": PyxisSandbox,
}
"""Engines other than Docker and Podman, whose commands are equal."""


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
    spec, image = plan.cluster.container, recipe_of(plan, job, vendor_dir)
    if spec is None:
        return Sandbox()
    kind = _SANDBOXES.get(spec.engine, ContainerSandbox)
    return kind(spec, load_vendor(plan.vendor), image, code, plan.cluster.clear_caches)


def model_files(job: JobSpec) -> tuple[Path, ...]:
    """Return the files that an inference job names by absolute path; containers must mount them."""
    if not isinstance(job.work, InferJob):
        return ()
    named = (job.work.settings.exist_onnx_path, job.work.settings.exist_compiler_path)
    return tuple(Path(name) for name in named if name is not None and Path(name).is_absolute())
