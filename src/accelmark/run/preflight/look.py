"""Looking at a host's devices: with its own Python where that can, else inside the image that the job will run in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import TypeAdapter, ValidationError

from accelmark.plan.plan import PlannedJob
from accelmark.run.controller.assign import job_on_hosts, node_works
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.place import Place
from accelmark.run.launchers.sandbox_of import recipe_of
from accelmark.run.preflight.facts import DeviceFacts, HostFacts, HostProblem
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.catalog import load_vendor

MODULE: Final = "accelmark.run.preflight.devices"
_DEVICES: Final = TypeAdapter(tuple[DeviceFacts, ...])
_CONTAINER_TIMEOUT_S: Final = 120.0


def has_devices(vendor: str) -> bool:
    """Tell whether a vendor's devices can be looked at: a CPU is always there, and never idle."""
    detect = load_vendor(vendor).telemetry.get("detect") or {}
    return bool(detect) and not (isinstance(detect, dict) and detect.get("always"))


def look_command(variables: Mapping[str, str], python: str, vendor: str) -> list[str]:
    """Return the command that prints a vendor's devices on a host."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), python, "-m", MODULE, vendor]


async def look_at_devices(
    place: Place, directory: RunDirectory, launcher: Launcher, job: PlannedJob, facts: HostFacts
) -> tuple[DeviceFacts, ...] | HostProblem | None:
    """Return the vendor's devices of a host, what is wrong with looking, or None where there are none to look at.

    A host whose Python cannot run AccelMark needs an engine only: its devices are looked at in the job's image, if
    that is there already. An image that has yet to be made is no error, but nobody has seen the devices then.

    Raises:
        HostError: the host was lost.
    """
    plan, name = directory.plan, place.host.name
    if not has_devices(plan.vendor):
        return None
    if not facts.lacking_modules:
        done = await place.run(look_command(await place.code(), place.python, plan.vendor))
    else:
        recipe = recipe_of(plan, job.job)
        if recipe is None or (await place.run(recipe.present)).code != 0:
            lacking = ", ".join(facts.lacking_modules)
            what = f"devices of {plan.vendor} cannot be looked at before its image is there"
            return HostProblem(name, what, f"{facts.executable} has no {lacking}", "warning")
        await place.code()
        works = node_works(directory, job, job_on_hosts(directory, job, go_on=False), launcher)
        work = next(work for work in works if work.host.name == name)
        done = await place.run(place.enclosed(work, MODULE, plan.vendor), timeout_s=_CONTAINER_TIMEOUT_S)
    if done.code != 0:
        return HostProblem(name, f"devices of {plan.vendor} cannot be read: {done.said}")
    try:
        return _DEVICES.validate_json(done.out)
    except ValidationError:
        return HostProblem(name, f"devices of {plan.vendor} cannot be read: {done.said}")
