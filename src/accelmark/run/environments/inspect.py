"""Find frameworks of this machine that are installed and cannot be used: in this Python and in each environment."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from accelmark.run.environments.registry import FrameworkEnvironment, registered
from accelmark.run.host import HostError, SubprocessHost
from accelmark.run.preflight.packages import (
    RANK_NEEDS,
    broken_imports,
    create_command,
    known_device,
    package_facts,
    package_problems,
    python_path,
)
from accelmark.spec.cluster import HostSpec, environment_python
from accelmark.spec.plugins.catalog import load_framework, readable
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.requirements import Need, distributions
from accelmark.telemetry.detect import default_vendor

_HERE: Final = SubprocessHost(HostSpec(address="localhost"))


def broken_frameworks() -> list[str]:
    """Return a line for each problem, with the command that repairs it.

    Raises:
        HostError: this Python cannot be run.
    """
    return asyncio.run(_all())


async def _all() -> list[str]:
    frameworks, vendor = readable("frameworks", load_framework)[0], default_vendor()
    checks = [_broken_here(framework) for framework in frameworks.values()]
    checks += [
        _broken_environment(environment, vendor)
        for environment in registered().values()
        if environment.framework in frameworks
    ]
    return [line for lines in await asyncio.gather(*checks) for line in lines]


async def _broken_here(framework: FrameworkSpec) -> list[str]:
    """Return the installed modules of a framework in this Python that cannot be imported."""
    facts = await package_facts(_HERE, sys.executable, [], framework.checked_imports, python_path())
    found = broken_imports(facts, framework, create_command(framework.name))
    return [f"{problem.what}: run {problem.hint}" for problem in found]


async def _broken_environment(environment: FrameworkEnvironment, vendor: str) -> list[str]:
    """Return what an environment lacks for a vendor's devices, and its modules that cannot be imported."""
    framework, path = load_framework(environment.framework), environment.path
    device = known_device(vendor, framework.name)  # None is reported by the inventory
    requirements = (*framework.requires, *(device.requires if device is not None else ()))
    needs = [
        *RANK_NEEDS,
        *(Need(requirement=requirement, needed_by=f"framework {framework.name}") for requirement in requirements),
    ]
    try:
        facts = await package_facts(_HERE, environment_python(path), distributions(needs), framework.checked_imports)
    except HostError as error:
        return [f"{error.what}: run {create_command(framework.name, path)}"]
    problems = package_problems(facts, needs, [], framework, path, device=device)
    return [f"{path}: {problem.what}: run {problem.hint}" for problem in problems]
