"""The sandbox of a job: native or a container, and the image that the container needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.sandboxes.container import ContainerSandbox
from accelmark.run.sandboxes.image import ImageRecipe, recipe_for
from accelmark.run.sandboxes.sandbox import NativeSandbox, Sandbox
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.job import ExternalJob, InferJob, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import find, load_vendor


@final
@dataclass(frozen=True, slots=True)
class JobSandbox:
    """A sandbox, and the image that it needs on a host."""

    sandbox: Sandbox
    image: ImageRecipe | None = None

    def image_commands(self) -> list[list[str]]:
        """Return the commands that look for the image, and obtain it where it is absent."""
        return [] if self.image is None else [self.image.present, self.image.make]


def job_sandbox(plan: Plan, job: JobSpec, code: PurePosixPath, vendor_dir: Path) -> JobSandbox:
    """Return the sandbox of a job.

    Args:
        plan: the run.
        job: the job; its framework selects the image.
        code: where AccelMark is on the hosts.
        vendor_dir: the vendor's folder on the hosts.
    """
    container = plan.cluster.container
    if container is None:
        return JobSandbox(NativeSandbox())
    container, key = _image_request(container, job)
    image = recipe_for(container, plan.vendor, find("vendors", plan.vendor).path, key, vendor_dir)
    vendor, clear = load_vendor(plan.vendor), plan.cluster.clear_caches
    return JobSandbox(ContainerSandbox(container, vendor, image.name, code, clear_caches=clear), image)


def model_files(job: JobSpec) -> tuple[Path, ...]:
    """Return the files that an inference job names by absolute path; containers have to mount them."""
    if not isinstance(job.work, InferJob):
        return ()
    named = (job.work.settings.exist_onnx_path, job.work.settings.exist_compiler_path)
    return tuple(Path(name) for name in named if name is not None and Path(name).is_absolute())


def require_images(plan: Plan) -> None:
    """Check that each job has an image, before anything is started.

    Raises:
        RequestError: a vendor has no recipe for a framework.
    """
    for planned in plan.jobs:
        recipe_of(plan, planned.job)


def recipe_of(plan: Plan, job: JobSpec) -> ImageRecipe | None:
    """Return the image of a job; None where it runs natively. The build context in it is that of this machine.

    Raises:
        RequestError: the vendor has no recipe for the job's framework.
    """
    if plan.cluster.container is None:
        return None
    folder = find("vendors", plan.vendor).path
    container, key = _image_request(plan.cluster.container, job)
    return recipe_for(container, plan.vendor, folder, key, folder)


def _image_request(container: ContainerSpec, job: JobSpec) -> tuple[ContainerSpec, CaseKey]:
    """Return container settings and key by which a job's image is chosen: a trainer's own, else its framework's."""
    if not isinstance(job.work, ExternalJob):
        return container, job.key
    image = container.image or job.work.trainer.image
    return container.model_copy(update={"image": image}), job.key.model_copy(update={"framework": job.framework})
