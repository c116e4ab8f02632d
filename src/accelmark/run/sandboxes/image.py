"""Container images of a vendor and framework, named by a hash of their recipe, so that a changed recipe is rebuilt."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, final

from accelmark.results.store.files import make_directory, write_errors
from accelmark.run.agent.error_lines import error_lines
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import tree_hash

IMAGE_LOG: Final = "image.log"
"""Output of the engine while it obtained the image, in the directory of the first job that needed it."""
_LOADED: Final = re.compile(r"^Loaded image[^:]*: *(.+)$", re.MULTILINE)
_ABSENT: Final = re.compile(
    r"no such manifest|manifest unknown|not found|unauthorized|denied|pinging container registry|did not resolve",
    re.IGNORECASE,
)
"""Errors of a registry, or of podman, with which a pull would fail too. Other errors of Docker's client are
inconclusive: its daemon, which pulls, may use a proxy or a mirror that the client does not.
"""
_FOUND: Final = re.compile("single image")
"""Older podman's error where the registry has the image for a single architecture."""
Availability = Literal["found", "absent", "unknown"]
RunCommand = Callable[[Sequence[str]], Awaitable[tuple[int, str]]]
"""Runs a command on a host; returns its exit code and output."""


@final
@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How to obtain an image on a host."""

    name: str
    present: list[str]
    """The command that exits with 0 where the host has the image."""
    make: list[str]
    """The command that builds, loads or pulls it."""
    archive: Path | None = None
    """The file that it is loaded from; None: it is built or pulled."""
    look_up: list[str] = field(default_factory=list)
    """The command that asks the registry for it; empty where it is not pulled."""

    @property
    def origin(self) -> str:
        """``loaded from FILE``, ``pulled`` or ``built``, for errors."""
        if self.archive is not None:
            return f"loaded from {self.archive}"
        return "pulled" if self.look_up else "built"


def availability(code: int, output: str) -> Availability:
    """Return whether a registry has an image, from the exit code and output of :attr:`ImageRecipe.look_up`."""
    if code == 0 or _FOUND.search(output):
        return "found"
    return "absent" if _ABSENT.search(output) else "unknown"


def recipe_for(container: ContainerSpec, vendor: str, folder: Path, key: CaseKey, context: Path) -> ImageRecipe:
    """Return the image that a key's ranks run in.

    Args:
        container: the container settings of the cluster file.
        vendor: the vendor's name.
        folder: its folder on this machine, for the hash.
        key: names the framework and its version.
        context: the same folder on the host, for the build.

    Raises:
        RequestError: the vendor has no recipe for this framework, or none for the version that the key names.
    """
    engine, archive = container.engine, container.image_file
    if container.image is not None:
        present = _present(engine, container.image)
        if archive is not None:
            return ImageRecipe(container.image, present, [engine, "load", "--input", str(archive)], archive)
        pull, look_up = [engine, "pull", container.image], [engine, "manifest", "inspect", container.image]
        return ImageRecipe(container.image, present, pull, look_up=look_up)
    directory = f"{key.framework}_{key.framework_version}" if key.framework_version else key.framework
    recipe = folder / "images" / directory
    if not (recipe / "Dockerfile").is_file():
        there = ", ".join(sorted(found.parent.name for found in folder.glob("images/*/Dockerfile"))) or "none"
        what = f"vendor {vendor!r} has no images/{directory}/Dockerfile"
        raise RequestError(f"{what} (it has: {there}): add one, or name an image (container.image)")
    name = f"accelmark-{vendor}-{directory}:{_content(recipe, container.build_options)}".lower()
    build = [engine, "build", "--tag", name, "--network", "host", *container.build_options]
    if container.pip_source is not None:
        build += ["--build-arg", f"PIP_SOURCE={container.pip_source}"]
    return ImageRecipe(name, _present(engine, name), [*build, str(context / "images" / directory)])


def _content(recipe: Path, build_options: Sequence[str]) -> str:
    """Return the hash of a recipe's folder and of the build options."""
    content = tree_hash(recipe)
    if build_options:
        content = hashlib.sha256("\0".join([content, *build_options]).encode()).hexdigest()
    return content[:16]


def _present(engine: str, name: str) -> list[str]:
    return [engine, "image", "inspect", name]


async def ensure_image(recipe: ImageRecipe, host: str, run: RunCommand, directory: Path) -> None:
    """Ensure that a host has an image.

    Args:
        recipe: the image.
        host: the host's name, for errors.
        run: runs a command there.
        directory: directory on this machine for ``image.log``.

    Raises:
        RunError: it could not be obtained; the host and the first errors are named.
    """
    if (await run(recipe.present))[0] == 0:
        return
    code, output = await run(recipe.make)
    make_directory(directory)
    with write_errors(directory / IMAGE_LOG):
        (directory / IMAGE_LOG).write_text(output, encoding="utf-8", errors="replace")
    if code != 0:
        why = error_lines(output) or f"exit code {code}"
        raise RunError(f"{host}: the image {recipe.name} could not be {recipe.origin}: {why}")
    if recipe.archive is not None and (await run(recipe.present))[0] != 0:
        held = ", ".join(_LOADED.findall(output)) or "an image without a name"
        what = f"{recipe.archive} contains {held}, not {recipe.name} (container.image)"
        raise RunError(f"{host}: {what}")
