"""Sandboxes: how a module of AccelMark is started on a host, natively or in a container, and images of containers.

An image of a vendor and framework is named by a hash of its recipe, so that a changed recipe is rebuilt.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_errors
from accelmark.run.agent.host import DROP_CACHES, DROP_CACHES_VARIABLE
from accelmark.run.agent.rank_exit import error_lines
from accelmark.run.host import Host
from accelmark.spec.cluster import CONTAINER_ENGINES, ContainerSpec
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import ExternalJob, InferJob, JobSpec
from accelmark.spec.plugins.catalog import find, load_vendor, tree_hash
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.secret import secrets_in, shown

_IMAGE_LOG: Final = "image.log"
"""Output of the engine while it obtained the image, in the directory of the first job that needed it."""
_LOADED: Final = re.compile(r"^Loaded image[^:]*: *(.+)$", re.MULTILINE)
_ENTER: Final = "accelmark/run/sandboxes/enter.sh"
"""Installs the packages that the agent lacks before it starts; relative to the code."""
_DROP_CACHES_INSIDE: Final = "/run/accelmark-drop-caches"
"""Where the host's drop_caches file is mounted: the container's own is read-only."""


class ImageRecipe(NamedTuple):
    """How to obtain an image on a host."""

    name: str
    present: list[str]
    """The command that exits with 0 where the host has the image."""
    make: list[str]
    """The command that builds, loads or pulls it; empty where it is a file that must exist."""
    archive: Path | None = None
    """The file that it is loaded from; None: it is built or pulled."""
    look_up: Sequence[str] = ()
    """The command that looks for it in the registry; empty where it is not pulled."""

    @property
    def command(self) -> str:
        """The command that obtains it, to be repeated by hand: without secrets."""
        return shlex.join(shown(self.make, secrets_in(self.make)))


def recipe_of(plan: Plan, job: JobSpec, context: Path | None = None) -> ImageRecipe | None:
    """Return the image of a job: the cluster file's or a trainer's own, else the vendor's for framework and version.

    None where it runs natively, or Slurm obtains it. It is built from ``context``, the vendor's folder on the host, by
    default on this machine.

    Raises RequestError: the vendor has no recipe for the job's framework, or none for the version that its key names.
    """
    container, version = plan.cluster.container, job.key.framework_version
    if container is None:
        return None
    if isinstance(job.work, ExternalJob):
        container = container.model_copy(update={"image": container.image or job.work.trainer.image})
    engine, named, folder = container.engine, named_image(container), find("vendors", plan.vendor).path
    if named is not None or engine == "pyxis":
        return named
    directory = f"{job.framework}_{version}" if version else job.framework
    recipe = folder / "images" / directory
    if not (recipe / "Dockerfile").is_file():
        others = ", ".join(sorted(recipe.parent.name for recipe in folder.glob("images/*/Dockerfile"))) or "none"
        problem = f"vendor {plan.vendor!r} has no images/{directory}/Dockerfile"
        raise RequestError(f"{problem} (it has: {others}): add one, or name an image (container.image)")
    content = tree_hash(recipe)
    if container.build_options:
        content = hashlib.sha256("\0".join([content, *container.build_options]).encode()).hexdigest()
    name = f"accelmark-{plan.vendor}-{directory}:{content[:16]}".lower()
    build = [engine, "build", "--tag", name, "--network", "host", *container.build_options]
    if container.pip_source is not None:
        build += ["--build-arg", f"PIP_SOURCE={container.pip_source}"]
    place = (context or folder) / "images" / directory
    return ImageRecipe(name, [engine, "image", "inspect", name], [*build, str(place)])


def named_image(container: ContainerSpec) -> ImageRecipe | None:
    """Return the image that a cluster file names; None where it is the vendor's, or Slurm obtains it."""
    engine, archive, image = container.engine, container.image_file, container.image
    if engine == "pyxis":
        return None
    if "image" in CONTAINER_ENGINES[engine].lacks:
        return ImageRecipe(str(archive), ["test", "-e", str(archive)], [], archive)
    if image is None:
        return None
    present = [engine, "image", "inspect", image]
    if archive is not None:
        return ImageRecipe(image, present, [engine, "load", "--input", str(archive)], archive)
    return ImageRecipe(image, present, [engine, "pull", image], look_up=[engine, "manifest", "inspect", image])


async def ensure_image(recipe: ImageRecipe, host: Host, directory: Path) -> None:
    """Ensure that a host has an image, with ``image.log`` in ``directory`` here. Raises RunError: it has none."""
    if (await host.run(recipe.present)).code == 0:
        return
    if not recipe.make:
        raise RunError(f"{host.name}: the image {recipe.name} is missing: copy it there, or correct image_file")
    made = await host.run(recipe.make, timeout_s=4 * 3600.0)
    make_directory(directory)
    with write_errors(directory / _IMAGE_LOG):
        (directory / _IMAGE_LOG).write_text(made.output, encoding="utf-8", errors="replace")
    if made.code != 0:
        why = error_lines(made.output) or f"exit code {made.code}"
        origin = "pulled" if recipe.look_up else "built"
        origin = origin if recipe.archive is None else f"loaded from {recipe.archive}"
        problem = f"the image {recipe.name} could not be {origin}: {why}"
        raise RunError(f"{host.name}: {problem}; repeat on that host: {recipe.command}")
    if recipe.archive is not None and (await host.run(recipe.present)).code != 0:
        loaded = ", ".join(_LOADED.findall(made.output)) or "an image without a name"
        raise RunError(f"{host.name}: {recipe.archive} contains {loaded}, not {recipe.name} (container.image)")


class ModuleCommand(NamedTuple):
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

    image: ImageRecipe | None = None
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
class _ContainerSandbox(Sandbox):
    """Runs commands in a container of Docker or Podman on the host's network; it is removed when they end."""

    spec: ContainerSpec
    vendor: VendorSpec
    """Declares the needs of its devices."""
    code: PurePosixPath
    """Where AccelMark is on the host, mounted at the same path."""
    image: ImageRecipe | None = None
    clear_caches: bool = False
    """Whether the agent drops the host's page cache."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
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
        places = set(inside.writable)
        writable = [path for path in dict.fromkeys(inside.writable) if not places & set(path.parents)]
        volumes += [f"{path}:{path}" for path in writable]
        there = {*map(Path, mounted), *writable}
        readable = dict.fromkeys([Path(self.code), *inside.readable])
        volumes += [f"{path}:{path}:ro" for path in readable if not there & {path, *path.parents}]
        return [*volumes, f"{DROP_CACHES}:{_DROP_CACHES_INSIDE}"] if self.clear_caches else volumes

    def variables(self, inside: ModuleCommand) -> dict[str, str]:
        pip: dict[str, str] = {}
        if (source := self.spec.pip_source) is not None:
            pip["PIP_INDEX_URL"], parts = source, urlsplit(source)
            if parts.scheme == "http":  # trusted because the cluster file names it
                pip["PIP_TRUSTED_HOST"] = parts.netloc.rpartition("@")[2]
        dropping = {DROP_CACHES_VARIABLE: _DROP_CACHES_INSIDE} if self.clear_caches else {}
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


class _ApptainerSandbox(_ContainerSandbox):
    """Runs commands in an image file by Apptainer, without the host's environment and home directory."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        command = ["apptainer", "exec", "--cleanenv", "--no-home"]
        command += [*self.vendor.container.apptainer_options, *self.spec.options]
        for volume in self.volumes(inside):
            command += ["--bind", volume]
        return [*command, str(self.spec.image_file), *self.with_variables(inside)]


class _EnrootSandbox(_ContainerSandbox):
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


class _PyxisSandbox(_ContainerSandbox):
    """Commands of a step of Slurm whose container Pyxis makes, by Enroot, before the step starts."""

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
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


_SANDBOXES: Final[dict[str, type[_ContainerSandbox]]] = {
    "apptainer": _ApptainerSandbox,
    "enroot": _EnrootSandbox,
    "pyxis": _PyxisSandbox,
}
"""Engines other than Docker and Podman, whose commands are equal."""


def job_sandbox(plan: Plan, job: JobSpec, code: PurePosixPath, vendor_dir: Path) -> Sandbox:
    """Return the sandbox of a job, with the paths of AccelMark and of the vendor's folder on the hosts."""
    spec, image = plan.cluster.container, recipe_of(plan, job, vendor_dir)
    if spec is None:
        return Sandbox()
    kind = _SANDBOXES.get(spec.engine, _ContainerSandbox)
    return kind(spec, load_vendor(plan.vendor), code, image, plan.cluster.clear_caches)


def model_files(job: JobSpec) -> tuple[Path, ...]:
    """Return the files that an inference job names by absolute path; containers must mount them."""
    if not isinstance(job.work, InferJob):
        return ()
    named = (job.work.settings.exist_onnx_path, job.work.settings.exist_compiler_path)
    return tuple(Path(name) for name in named if name is not None and Path(name).is_absolute())
