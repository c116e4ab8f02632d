"""The image of a vendor and framework: named by what it is made of, so that a changed recipe is never an old image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, final

from accelmark.results.store.files import make_directory, naming_the_disk
from accelmark.run.agent.error_lines import telling_lines
from accelmark.spec.catalog import tree_hash
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.key import CaseKey

IMAGE_LOG: Final = "image.log"
"""What the engine said while it made the image, in the directory of the job that needed it first."""
_LOADED: Final = re.compile(r"^Loaded image[^:]*: *(.+)$", re.MULTILINE)
_ABSENT: Final = re.compile(
    r"no such manifest|manifest unknown|not found|unauthorized|denied|pinging container registry|did not resolve",
    re.IGNORECASE,
)
"""A registry's own word; or podman's, which pulls by the same way. Docker's client is not who pulls: its daemon may
know a proxy or mirror where the client reaches nothing."""
_FOUND: Final = re.compile("single image")
"""What older podman ends with where a registry has the image, but for one architecture alone."""
Sought = Literal["found", "absent", "unsure"]
RunCommand = Callable[[Sequence[str]], Awaitable[tuple[int, str]]]
"""Runs a command on a host; gives its exit code and all that it said."""


@final
@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How to have an image on a host."""

    name: str
    present: list[str]
    """The command that ends with 0 where the image is there."""
    make: list[str]
    """The command that builds, loads or pulls it."""
    archive: Path | None = None
    """The file that it is loaded from, where it is."""
    seek: list[str] = field(default_factory=list)
    """The command that asks a registry whether it has it; empty where it is not pulled."""

    @property
    def origin(self) -> str:
        """How it is made, for errors."""
        if self.archive is not None:
            return f"loaded from {self.archive}"
        return "pulled" if self.seek else "built"


def sought(code: int, told: str) -> Sought:
    """Return what :attr:`ImageRecipe.seek` found, from its exit code and what it said."""
    if code == 0 or _FOUND.search(told):
        return "found"
    return "absent" if _ABSENT.search(told) else "unsure"


def recipe_for(container: ContainerSpec, vendor: str, folder: Path, key: CaseKey, context: Path) -> ImageRecipe:
    """Return the image that a key's ranks run in.

    Args:
        container: the cluster's wishes.
        vendor: the vendor's name.
        folder: its folder on this machine, to hash.
        key: names the framework and its version.
        context: the same folder as the host sees it, to build from.

    Raises:
        RequestError: the vendor has no recipe for this framework, or none for the version that the key names.
    """
    engine, archive = container.engine, container.image_file
    if container.image is not None:
        present = _present(engine, container.image)
        if archive is not None:
            return ImageRecipe(container.image, present, [engine, "load", "--input", str(archive)], archive)
        pull, seek = [engine, "pull", container.image], [engine, "manifest", "inspect", container.image]
        return ImageRecipe(container.image, present, pull, seek=seek)
    directory = f"{key.framework}_{key.framework_version}" if key.framework_version else key.framework
    recipe = folder / "images" / directory
    if not (recipe / "Dockerfile").is_file():
        there = ", ".join(sorted(found.parent.name for found in folder.glob("images/*/Dockerfile"))) or "none"
        what = f"vendor {vendor!r} has no image for {directory}: there is no images/{directory}/Dockerfile"
        raise RequestError(f"{what} (those that are: {there}); write one, or name an image (container.image)")
    name = f"accelmark-{vendor}-{directory}:{_content(recipe, container.build_options)}".lower()
    build = [engine, "build", "--tag", name, "--network", "host", *container.build_options]
    if container.pip_source is not None:
        build += ["--build-arg", f"PIP_SOURCE={container.pip_source}"]
    return ImageRecipe(name, _present(engine, name), [*build, str(context / "images" / directory)])


def _content(recipe: Path, build_options: Sequence[str]) -> str:
    """Return the hash of what an image is made of: its folder, and the options that may change what comes out."""
    content = tree_hash(recipe)
    if build_options:
        content = hashlib.sha256("\0".join([content, *build_options]).encode()).hexdigest()
    return content[:16]


def _present(engine: str, name: str) -> list[str]:
    return [engine, "image", "inspect", name]


async def have_image(recipe: ImageRecipe, host: str, run: RunCommand, directory: Path) -> None:
    """See to it that an image is on a host.

    Args:
        recipe: the image.
        host: the host's name, for errors.
        run: runs a command there.
        directory: where on this machine ``image.log`` goes.

    Raises:
        RunError: it cannot be had; the host and the first errors are named.
    """
    if (await run(recipe.present))[0] == 0:
        return
    code, told = await run(recipe.make)
    make_directory(directory)
    with naming_the_disk(directory / IMAGE_LOG):
        (directory / IMAGE_LOG).write_text(told, encoding="utf-8", errors="replace")
    if code != 0:
        why = telling_lines(told) or f"exit code {code}"
        raise RunError(f"{host}: the image {recipe.name} could not be {recipe.origin}: {why}")
    if recipe.archive is not None and (await run(recipe.present))[0] != 0:
        held = ", ".join(_LOADED.findall(told)) or "something without a name"
        what = f"{recipe.archive} holds no image {recipe.name} (container.image): what it holds was loaded as {held}"
        raise RunError(f"{host}: {what}")
