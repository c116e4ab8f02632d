"""The image of a vendor and framework: named by what it is made of, so that a changed recipe is never an old image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from accelmark.spec.catalog import tree_hash
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.key import CaseKey


@final
@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How to have an image on a host."""

    name: str
    present: list[str]
    """The command that ends with 0 where the image is there."""
    make: list[str]
    """The command that builds or loads it; empty where it has to be there already."""


def recipe_for(container: ContainerSpec, vendor: str, folder: Path, key: CaseKey, context: Path) -> ImageRecipe:
    """Return the image that a key's ranks run in.

    Args:
        container: the cluster's wishes.
        vendor: the vendor's name.
        folder: its folder on this machine, to hash.
        key: names the framework and its version.
        context: the same folder as the host sees it, to build from.

    Raises:
        RequestError: the vendor has no recipe for this framework.
    """
    engine = container.engine
    if container.image is not None:
        load = [engine, "load", "--input", str(container.image_file)] if container.image_file is not None else []
        return ImageRecipe(container.image, _present(engine, container.image), load)
    versioned = f"{key.framework}_{key.framework_version}"
    directory = versioned if (folder / "images" / versioned).is_dir() else key.framework
    recipe = folder / "images" / directory
    if not (recipe / "Dockerfile").is_file():
        what = f"vendor {vendor!r} has no image for {key.framework}: there is no images/{directory}/Dockerfile"
        raise RequestError(f"{what}; write one, or name an image in the cluster file (container.image)")
    name = f"accelmark-{vendor}-{directory}:{tree_hash(recipe)[:16]}".lower()
    build = [engine, "build", "--tag", name, "--network", "host", *container.build_options]
    if container.pip_source is not None:
        build += ["--build-arg", f"PIP_SOURCE={container.pip_source}"]
    return ImageRecipe(name, _present(engine, name), [*build, str(context / "images" / directory)])


def _present(engine: str, name: str) -> list[str]:
    return [engine, "image", "inspect", name]
