"""The packages that ranks need on a host: read from the Python that runs them, and compared with the requirements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from accelmark.run.host import Host, HostError
from accelmark.run.onhost import command
from accelmark.run.preflight.facts import PackageFacts
from accelmark.spec.errors import Problem, RequestError
from accelmark.spec.plugins.catalog import framework_device, load_framework, load_vendor
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.requirements import (
    Missing,
    Need,
    install_command,
    missing,
    missing_text,
    pip_install,
)
from accelmark.spec.plugins.vendor import FrameworkDevice
from accelmark.telemetry.inventory import default_vendor

OLDEST_PYTHON: Final = (3, 9)
"""Of agents and ranks. The coordinator's is in :mod:`accelmark.cli`."""
_IMPORT_TIMEOUT_S: Final = 300.0
_RANK_NEEDS: Final = (
    "numpy",
    "packaging",
    "psutil",
    "pydantic>=2.9",
    "PyYAML",
    'eval_type_backport; python_version < "3.10"',
)
RANK_NEEDS: Final = tuple(Need(requirement=one, needed_by="AccelMark") for one in _RANK_NEEDS)
"""What AccelMark itself needs in the environment of a framework."""


async def package_facts(
    host: Host,
    python: str,
    distributions: Sequence[str],
    modules: Sequence[str] = (),
    python_path: Sequence[str] = (),
    imports: Sequence[str] = (),
    enter: Callable[[str], list[str]] | None = None,
) -> PackageFacts:
    """Return the versions of packages of a Python on a host, and which cannot be imported.

    ``modules`` and the modules of the packages ``imports`` are tried, where they are installed. ``enter`` returns the
    command that answers a request in a container.

    Raises HostError: the Python cannot be run.
    """
    names = {"distributions": distributions, "modules": modules, "python_path": python_path, "imports": imports}
    request = json.dumps({name: list(values) for name, values in names.items()})
    argv = command(python, "packages", request) if enter is None else enter(request)
    done = await host.run(argv, timeout_s=_IMPORT_TIMEOUT_S)
    if done.code != 0:
        raise HostError(host.name, f"the packages of {python} cannot be read: {done.message}")
    try:
        return PackageFacts.model_validate_json(done.out.strip().rpartition(b"\n")[2])
    except ValidationError as error:
        raise HostError(host.name, f"{python} did not print its packages: {error.errors()[0]['msg']}") from error


def package_problems(
    facts: PackageFacts,
    needs: Sequence[Need],
    installed: Sequence[str],
    framework: FrameworkSpec,
    environment: Path | None = None,
    *,
    image: str | None = None,
    device: FrameworkDevice | None = None,
    is_here: bool = True,
) -> Iterator[Problem]:
    """Yield what the jobs of a framework need and a host's Python lacks, and its broken modules; ``where`` is empty.

    Args:
        installed: packages that are installed for the ranks before they start.
        environment: its virtual environment, if its ranks run in one.
        is_here: the host is this machine.
    """
    create = create_command(framework.name, environment, is_here=is_here)
    if image is not None:
        create = f"install it in the image {image}"
    all_lacking = missing(needs, facts.versions.get, installed, facts.python)
    for item in all_lacking:
        if item.need.sdk:
            yield Problem("", "", missing_text([item]), f"install {item.requirement} from {item.need.sdk}")
    if lacking := [item for item in all_lacking if not item.need.sdk]:
        index = _index_of(lacking, framework, device)
        if is_here and environment is None:
            hint = install_command(lacking, facts.executable, index)
        else:  # a Python that needs no AccelMark, and may be too old for it
            hint = pip_install([item.requirement for item in lacking], facts.executable, index)
            hint = hint if is_here else f"run there: {hint}"
        if image is not None:
            hint = f"{create}: {pip_install([item.requirement for item in lacking], facts.executable)}"
        elif any(item.need.needed_by == f"framework {framework.name}" for item in lacking):
            hint = f"{hint}; or, in an environment of its own: {create}" if environment is None else create
        yield Problem("", "", missing_text(lacking), hint)
    if environment is not None and facts.python < OLDEST_PYTHON:
        version = ".".join(map(str, facts.python))
        yield Problem(
            "", "", f"{facts.executable} is Python {version}, {'.'.join(map(str, OLDEST_PYTHON))} is needed", create
        )
    yield from broken_imports(facts, framework, create)


def known_device(vendor: str, framework: str) -> FrameworkDevice | None:
    """Return a vendor's device for ``framework``, None where no file declares it."""
    try:
        return framework_device(load_vendor(vendor), framework)
    except RequestError:
        return None


def _index_of(lacking: Iterable[Missing], framework: FrameworkSpec, device: FrameworkDevice | None) -> str | None:
    """Return the index with the framework's builds for a device, if it has one and the framework is lacking."""
    is_lacking = not {package.name for package in lacking}.isdisjoint(framework.distributions)
    return device.index if device is not None and is_lacking else None


def broken_imports(facts: PackageFacts, framework: FrameworkSpec, create: str) -> Iterator[Problem]:
    """Yield a problem for each module that cannot be imported, with the command that repairs it.

    ``create`` installs the framework again, and pip a package that the jobs need, with what that lacks; other modules
    are uninstalled.
    """
    for module, message in facts.broken.items():
        remove = f"{facts.executable} -m pip uninstall {module}"
        hint = remove if facts.versions.get(module) is None else pip_install([module], facts.executable)
        if module in (framework.module, *framework.companion_modules):
            hint = create
        yield Problem("", "", f"{facts.executable}: import {module} fails: {message}", hint)


def create_command(framework: str, environment: Path | None = None, *, is_here: bool = True) -> str:
    """Return the command that creates or repairs a framework's environment, here or on the hosts of a cluster file."""
    place = "" if environment is None else f" --path {environment}"
    return f"accelmark env create {framework}" + (place if is_here else " --hosts CLUSTER")


def require_here(needed_by: str, *requirements: str) -> None:
    """Check that this Python has what a verb needs that computes on this machine's devices.

    Raises RequestError: with the missing packages and the command that installs them, in the builds for the devices.
    """
    lacking = missing(Need(requirement=requirement, needed_by=needed_by) for requirement in requirements)
    if lacking:
        vendor = load_vendor(default_vendor())
        indexes = (_index_of(lacking, load_framework(name), device) for name, device in vendor.frameworks.items())
        install = install_command(lacking, index=next(filter(None, indexes), None))
        raise RequestError(f"{missing_text(lacking)}: run {install}")
