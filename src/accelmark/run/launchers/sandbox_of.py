"""What a job of a plan runs in on its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.sandboxes.container import ContainerSandbox
from accelmark.run.sandboxes.image import ImageRecipe, recipe_for
from accelmark.run.sandboxes.native import NativeSandbox
from accelmark.run.sandboxes.sandbox import Sandbox
from accelmark.spec.catalog import find, load_vendor
from accelmark.spec.job import JobSpec
from accelmark.spec.work import InferJob


@final
@dataclass(frozen=True, slots=True)
class Enclosure:
    """A sandbox, and the image that it needs on a host."""

    sandbox: Sandbox
    recipe: ImageRecipe | None = None

    def having_image(self) -> list[list[str]]:
        """Return the commands that see to it that the image is there: whether it is, and what makes it where not."""
        recipe = self.recipe
        return [] if recipe is None else [recipe.present, recipe.make]


def enclosure_for(plan: Plan, job: JobSpec, code: PurePosixPath, vendor_dir: Path) -> Enclosure:
    """Return what a job runs in.

    Args:
        plan: the run.
        job: the job, for its framework.
        code: where AccelMark is on the hosts.
        vendor_dir: the vendor's folder on the hosts.
    """
    container = plan.cluster.container
    if container is None:
        return Enclosure(NativeSandbox())
    recipe = recipe_for(container, plan.vendor, find("vendors", plan.vendor).path, job.key, vendor_dir)
    vendor, clear = load_vendor(plan.vendor), plan.cluster.clear_caches
    return Enclosure(ContainerSandbox(container, vendor, recipe.name, code, clear_caches=clear), recipe)


def model_files(job: JobSpec) -> tuple[Path, ...]:
    """Return the files that an inference job names by their whole path: they have to be seen inside too."""
    if not isinstance(job.work, InferJob):
        return ()
    named = (job.work.settings.exist_onnx_path, job.work.settings.exist_compiler_path)
    return tuple(Path(name) for name in named if name is not None and Path(name).is_absolute())


def refuse_missing_images(plan: Plan) -> None:
    """See that each job's image can be named, before anything is started.

    Raises:
        RequestError: a vendor has no recipe for a framework.
    """
    for planned in plan.jobs:
        recipe_of(plan, planned.job)


def python_inside(plan: Plan) -> str:
    """Return the Python that ranks run with: the container's, else the hosts'."""
    return plan.cluster.container.python if plan.cluster.container is not None else plan.cluster.python


def recipe_of(plan: Plan, job: JobSpec) -> ImageRecipe | None:
    """Return the image that a job runs in, None where it runs natively; where it is made from plays no part.

    Raises:
        RequestError: the vendor has no recipe for the job's framework.
    """
    if plan.cluster.container is None:
        return None
    folder = find("vendors", plan.vendor).path
    return recipe_for(plan.cluster.container, plan.vendor, folder, job.key, folder)
