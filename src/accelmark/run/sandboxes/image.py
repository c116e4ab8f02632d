"""Container images of a vendor and framework, named by a hash of their recipe, so that a changed recipe is rebuilt."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_errors
from accelmark.run.agent.rank_exit import error_lines
from accelmark.run.host import Host
from accelmark.spec.cluster import CONTAINER_ENGINES, ContainerSpec
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import find, tree_hash
from accelmark.spec.secret import secrets_in, shown

IMAGE_LOG: Final = "image.log"
"""Output of the engine while it obtained the image, in the directory of the first job that needed it."""
_LOADED: Final = re.compile(r"^Loaded image[^:]*: *(.+)$", re.MULTILINE)
_TIMEOUT_S: Final = 4 * 3600.0


@final
@dataclass(frozen=True)
class ImageRecipe:
    """How to obtain an image on a host."""

    name: str
    present: list[str]
    """The command that exits with 0 where the host has the image."""
    make: list[str]
    """The command that builds, loads or pulls it; empty where it is a file that must exist."""
    archive: Path | None = None
    """The file that it is loaded from; None: it is built or pulled."""
    look_up: list[str] = field(default_factory=list)
    """The command that looks for it in the registry; empty where it is not pulled."""

    @property
    def command(self) -> str:
        """The command that obtains it, to be repeated by hand: without secrets."""
        return shlex.join(shown(self.make, secrets_in(self.make)))

    @property
    def origin(self) -> str:
        """``loaded from FILE``, ``pulled`` or ``built``, for errors."""
        if self.archive is not None:
            return f"loaded from {self.archive}"
        return "pulled" if self.look_up else "built"


def require_images(plan: Plan) -> None:
    """Check that each job has an image, before anything is started.

    Raises RequestError: a vendor has no recipe for a framework.
    """
    for planned in plan.jobs:
        recipe_of(plan, planned.job)


def recipe_of(plan: Plan, job: JobSpec, context: Path | None = None) -> ImageRecipe | None:
    """Return the image of a job, a trainer's own or its framework's; None where it runs natively, or Slurm obtains it.

    It is built from ``context``, the vendor's folder on the host, by default on this machine.

    Raises RequestError: the vendor has no recipe for the job's framework.
    """
    container, key = plan.cluster.container, job.key
    if container is None:
        return None
    if isinstance(job.work, ExternalJob):
        container = container.model_copy(update={"image": container.image or job.work.trainer.image})
        key = key.model_copy(update={"framework": job.framework})
    folder = find("vendors", plan.vendor).path
    return recipe_for(container, plan.vendor, folder, key, context or folder)


def recipe_for(container: ContainerSpec, vendor: str, folder: Path, key: CaseKey, context: Path) -> ImageRecipe | None:
    """Return the image that a key's ranks run in: the cluster file's, else the vendor's for the framework and version.

    None where nothing prepares it: Pyxis imports it when a step starts.

    ``folder`` is the vendor's folder on this machine, ``context`` that on the host.

    Raises RequestError: the vendor has no recipe for this framework, or none for the version that the key names.
    """
    engine, named = container.engine, named_image(container)
    if named is not None or engine == "pyxis":
        return named
    directory = f"{key.framework}_{key.framework_version}" if key.framework_version else key.framework
    recipe = folder / "images" / directory
    if not (recipe / "Dockerfile").is_file():
        vendors = ", ".join(sorted(recipe.parent.name for recipe in folder.glob("images/*/Dockerfile"))) or "none"
        problem = f"vendor {vendor!r} has no images/{directory}/Dockerfile"
        raise RequestError(f"{problem} (it has: {vendors}): add one, or name an image (container.image)")
    content = tree_hash(recipe)
    if container.build_options:
        content = hashlib.sha256("\0".join([content, *container.build_options]).encode()).hexdigest()
    name = f"accelmark-{vendor}-{directory}:{content[:16]}".lower()
    build = [engine, "build", "--tag", name, "--network", "host", *container.build_options]
    if container.pip_source is not None:
        build += ["--build-arg", f"PIP_SOURCE={container.pip_source}"]
    return ImageRecipe(name, [engine, "image", "inspect", name], [*build, str(context / "images" / directory)])


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
    """Ensure that a host has an image; ``image.log`` is written to ``directory`` on this machine.

    Raises RunError: it could not be obtained; the host and the first errors are named.
    """
    if (await host.run(recipe.present)).code == 0:
        return
    if not recipe.make:
        raise RunError(f"{host.name}: the image {recipe.name} is missing: copy it there, or correct image_file")
    made = await host.run(recipe.make, timeout_s=_TIMEOUT_S)
    make_directory(directory)
    with write_errors(directory / IMAGE_LOG):
        (directory / IMAGE_LOG).write_text(made.output, encoding="utf-8", errors="replace")
    if made.code != 0:
        why = error_lines(made.output) or f"exit code {made.code}"
        problem = f"the image {recipe.name} could not be {recipe.origin}: {why}"
        raise RunError(f"{host.name}: {problem}; repeat on that host: {recipe.command}")
    if recipe.archive is not None and (await host.run(recipe.present)).code != 0:
        loaded = ", ".join(_LOADED.findall(made.output)) or "an image without a name"
        raise RunError(f"{host.name}: {recipe.archive} contains {loaded}, not {recipe.name} (container.image)")
