"""Looking for images that have to be pulled: whether a host has them, or a registry does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.launchers.place import Place
from accelmark.run.launchers.sandbox_of import recipe_of
from accelmark.run.launchers.ssh.connection import HostError, UnreachableError
from accelmark.run.preflight.facts import HostProblem, Severity
from accelmark.run.sandboxes.image import ImageRecipe, sought

_REGISTRY_TIMEOUT_S: Final = 60.0
_HINT: Final = "correct container.image, log in to its registry on the host, or bring it as a file (image_file)"


def pulled_images(plan: Plan, jobs: Sequence[PlannedJob]) -> list[ImageRecipe]:
    """Return each image of ``jobs`` that is pulled where it is absent; what is built or loaded is left out."""
    recipes = (recipe_of(plan, job.job) for job in jobs)
    return list({recipe.name: recipe for recipe in recipes if recipe is not None and recipe.seek}.values())


async def look_for_images(place: Place, plan: Plan, jobs: Sequence[PlannedJob]) -> list[HostProblem]:
    """Return what is wrong with the images of ``jobs`` on a host: neither there nor to be had from a registry.

    Where it cannot be told whether pulling would fail too, it is a warning.

    Raises:
        UnreachableError: the host was lost.
    """
    found: list[HostProblem] = []
    for recipe in pulled_images(plan, jobs):
        if (await place.run(recipe.present)).code == 0:
            continue
        what = f"the image {recipe.name} is not there, and not found to be pulled"
        try:
            done = await place.run(recipe.seek, timeout_s=_REGISTRY_TIMEOUT_S)
        except UnreachableError:
            raise
        except HostError as error:
            found.append(HostProblem(place.host.name, f"{what}: {error.what}", _HINT, "warning"))
            continue
        answer = sought(done.code, done.said)
        if answer != "found":
            severity: Severity = "error" if answer == "absent" else "warning"
            found.append(HostProblem(place.host.name, f"{what}: {done.said}", _HINT, severity))
    return found
