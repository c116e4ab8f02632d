"""Check the devices and the container images of one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import TypeAdapter, ValidationError

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.controller.node_jobs import job_on_hosts, node_jobs
from accelmark.run.host import Host, HostError, UnreachableError
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.preflight.facts import DeviceFacts, HostFacts, HostProblem, Severity, device_problems
from accelmark.run.record.directory import RunDirectory
from accelmark.run.sandboxes.image import ImageRecipe, availability, recipe_of
from accelmark.spec.plugins.catalog import load_vendor

_MODULE: Final = "accelmark.run.preflight.devices"
_DEVICES: Final = TypeAdapter(tuple[DeviceFacts, ...])
_CONTAINER_TIMEOUT_S: Final = 120.0
_REGISTRY_TIMEOUT_S: Final = 60.0
_HINT: Final = "correct container.image, log in to its registry on the host, or provide it as a file (image_file)"


def has_devices(vendor: str) -> bool:
    """Return whether a vendor's devices can be checked; CPUs are always present and in use."""
    detect = load_vendor(vendor).telemetry.get("detect") or {}
    return bool(detect) and not (isinstance(detect, dict) and detect.get("always"))


def devices_command(variables: Mapping[str, str], python: str, vendor: str) -> list[str]:
    """Return the command that prints a vendor's devices on a host."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), python, "-m", _MODULE, vendor]


async def check_devices(
    host: Host, directory: RunDirectory, launcher: Launcher, jobs: Sequence[PlannedJob], facts: HostFacts
) -> tuple[tuple[DeviceFacts, ...], list[HostProblem]]:
    """Return the vendor's devices on a host, and what is wrong with them or why they cannot be read.

    Where the host's Python cannot run AccelMark, they are read in the first job's image. An image that is still to be
    built is a warning.

    Raises:
        HostError: the connection to the host was lost.
    """
    plan, name = directory.plan, host.name
    if not has_devices(plan.vendor):
        return (), []
    if not facts.lacking_modules:
        await launcher.deliver(host.spec)
        done = await host.run(devices_command(launcher.variables, launcher.python, plan.vendor))
    else:
        recipe = recipe_of(plan, jobs[0].job)
        if recipe is None or (await host.run(recipe.present)).code != 0:
            what = f"devices of {plan.vendor} cannot be read before the image exists"
            lacking = f"{facts.executable} lacks {', '.join(facts.lacking_modules)}"
            return (), [HostProblem(name, what, lacking, "warning")]
        await launcher.deliver(host.spec)
        nodes = node_jobs(directory, jobs[0], job_on_hosts(directory, jobs[0], go_on=False), launcher)
        node = next(node for node in nodes if node.host.name == name)
        done = await host.run(launcher.sandbox_command(node, _MODULE, plan.vendor), timeout_s=_CONTAINER_TIMEOUT_S)
    try:
        if done.code == 0:
            devices = _DEVICES.validate_json(done.out)
            needed = max(node.nproc for job in jobs for node in job.nodes if node.host == name)
            return devices, device_problems(name, devices, plan.vendor, needed)
    except ValidationError:
        pass
    return (), [HostProblem(name, f"devices of {plan.vendor} cannot be read: {done.message}")]


def pulled_images(plan: Plan, jobs: Sequence[PlannedJob]) -> list[ImageRecipe]:
    """Return each image of ``jobs`` that is pulled where it is absent, not built or loaded."""
    recipes = (recipe_of(plan, job.job) for job in jobs)
    return list({recipe.name: recipe for recipe in recipes if recipe is not None and recipe.look_up}.values())


async def check_images(host: Host, plan: Plan, jobs: Sequence[PlannedJob]) -> list[HostProblem]:
    """Return a problem for each image of ``jobs`` that is neither on a host nor in its registry.

    Where it is not known whether a pull would fail, the problem is a warning.

    Raises:
        UnreachableError: the connection to the host was lost.
    """
    found: list[HostProblem] = []
    for recipe in pulled_images(plan, jobs):
        if (await host.run(recipe.present)).code == 0:
            continue
        what = f"the image {recipe.name} is absent, and was not found in its registry"
        try:
            done = await host.run(recipe.look_up, timeout_s=_REGISTRY_TIMEOUT_S)
        except UnreachableError:
            raise
        except HostError as error:
            found.append(HostProblem(host.name, f"{what}: {error.what}", _HINT, "warning"))
            continue
        answer = availability(done.code, done.message)
        if answer != "found":
            severity: Severity = "error" if answer == "absent" else "warning"
            found.append(HostProblem(host.name, f"{what}: {done.message}", _HINT, severity))
    return found
