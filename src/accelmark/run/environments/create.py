"""Create, remove, check and record a framework's virtual environment, on this machine or on the hosts of a cluster."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from accelmark.datasets.ensure import cache_directory
from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import error_lines
from accelmark.run.host import Host, HostError, SubprocessHost, python_path
from accelmark.run.preflight import checks
from accelmark.spec.cluster import HostSpec, environment_python
from accelmark.spec.errors import RequestError
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import find, framework_device, load_framework, load_vendor, readable
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.requirements import Need, base_requirements, distributions, requirement_texts
from accelmark.spec.secret import without_userinfo
from accelmark.telemetry.inventory import default_vendor

_PLACE: Final = "environments"
_MARKER: Final = "accelmark-environment"
"""File in an environment that AccelMark created; only directories with it are removed."""
_CONSTRAINTS: Final = "constraints.txt"
_PREPARE: Final = """\
if [ -e "$1" ] && [ ! -f "$1/pyvenv.cfg" ] && [ ! -f "$1/$3" ] && [ -n "$(ls -A "$1")" ]; then
  echo "$1 is not empty and no virtual environment: name another directory with --path" >&2; exit 3
fi
# A cluster file may name the Python of the environment, which does not exist yet.
[ "$2" != "$1/bin/python" ] || [ -x "$2" ] || set -- "$1" python3 "$3" "$4"
"$2" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || {
  echo "$2 is missing or older than Python 3.9: set python in the cluster file" >&2; exit 4
}
"$2" -m venv -- "$1" || {
  echo "$2 -m venv failed: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 5
}
touch -- "$1/$3"
cat > "$1/$4"
"""
"""Arguments: the directory, the Python, the marker, and the file for the constraints, which are standard input."""
_REMOVE: Final = """\
[ -e "$1" ] || exit 0
[ -f "$1/$2" ] || { echo "$1 was not created by accelmark env create: remove it yourself" >&2; exit 3; }
rm -rf -- "$1"
"""
"""Arguments: the directory and the marker."""
_UNREACHED: Final = re.compile(r"after connection broken by '(.+)': /")
"""pip's warning about a connection that failed. Its errors name packages only, as if the index did not have them."""
_INSTALL_TIMEOUT_S: Final = 4 * 3600.0
_REACH: Final = """\
import sys
from urllib.request import Request, urlopen
urlopen(Request(sys.argv[1], headers={"User-Agent": "accelmark"}), timeout=10).close()
"""
"""Open the address in the first argument once: pip retries an unreachable index for each package."""
Report = Callable[[str, str], None]
"""Called with a host and the activity there."""


class FrameworkEnvironment(Spec):
    """A virtual environment of a framework on this machine."""

    framework: str
    path: Path
    created_at: str
    versions: dict[str, str]
    """The framework's packages -> their versions, when it was created."""

    @property
    def exists(self) -> bool:
        """Whether it still has a Python."""
        return Path(environment_python(self.path)).is_file()

    @property
    def title(self) -> str:
        """Its packages with their versions, or that it does not exist any more."""
        listed = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return listed if self.exists else "no Python any more"

    def to_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {**self.model_dump(mode="json"), "exists": self.exists}


def default_path(framework: str) -> Path:
    """Return where a framework's environment is created unless another directory is given."""
    return cache_directory() / _PLACE / framework


def registered() -> dict[str, FrameworkEnvironment]:
    """Return the environments of this machine by framework; damaged records are skipped."""
    stored = map(FrameworkEnvironment.stored, sorted((cache_directory() / _PLACE).glob("*.json")))
    return {environment.framework: environment for environment in stored if environment is not None}


def record_of(framework: str) -> Path:
    """Return the file that records a framework's environment."""
    return cache_directory() / _PLACE / f"{framework}.json"


def register(environment: FrameworkEnvironment) -> None:
    """Record an environment, in place of an earlier one of its framework."""
    record = record_of(environment.framework)
    make_directory(record.parent)
    write_atomic(record, environment.model_dump_json(indent=2))


def with_environments(plan: Plan) -> Plan:
    """Return a plan for this machine with the registered environments of its frameworks; other plans unchanged.

    Environments that the plan's cluster names take precedence.

    Raises RequestError: a registered environment does not exist any more.
    """
    cluster = plan.cluster
    if cluster.container is not None or not load_launcher(cluster.launcher).is_localhost:
        return plan
    known, paths = registered(), dict(cluster.environments)
    for framework in sorted({job.job.framework for job in plan.jobs} - set(paths)):
        if framework not in known:
            continue
        if not known[framework].exists:
            raise RequestError(
                f"the environment of {framework} in {known[framework].path} has no Python any more: "
                f"run accelmark env create {framework}, or accelmark env remove {framework}"
            )
        paths[framework] = known[framework].path
    return plan.model_copy(update={"cluster": cluster.model_copy(update={"environments": paths})})


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of an environment, and the source of its packages."""

    framework: str
    requirements: tuple[str, ...]
    """Packages of the framework; those that AccelMark itself needs are installed too."""
    constraints: Path | None
    """The framework's ``constraints.txt`` on this machine, if it has one."""
    index: str | None = None
    """Address of a package index, in place of PyPI."""
    wheels: Path | None = None
    """Directory with wheels on the hosts; without ``index`` nothing is downloaded."""
    device_index: str | None = None
    """Address of an index with builds for the device, in addition to PyPI."""

    def install_command(self, path: Path) -> list[str]:
        """Return the command that installs the packages."""
        pip = [environment_python(path), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        if self.wheels is not None:
            pip += [*([] if self.index is not None else ["--no-index"]), "--find-links", str(self.wheels)]
        if self.index is not None:
            parts = urlsplit(self.index)
            pip += ["--index-url", self.index]
            pip += ["--trusted-host", parts.netloc.rpartition("@")[2]] if parts.scheme == "http" else []
        if self.device_index is not None:
            pip += ["--extra-index-url", self.device_index]
        packages = dict.fromkeys((*base_requirements(), *requirement_texts(self.requirements)))
        return [*pip, "--constraint", str(constraints_file(path)), *packages]


def constraints_file(path: Path) -> Path:
    """Return the file of an environment with the versions that pip installs."""
    return path / _CONSTRAINTS


def recipe_of(framework: str, vendor: str, index: str | None, wheels: Path | None) -> Recipe:
    """Return the recipe of a framework's environment on a vendor's devices: AccelMark's packages and the framework's.

    Raises RequestError: there is no such framework, or it has no device of this vendor.
    """
    folder, spec = find("frameworks", framework).path, load_framework(framework)
    device = framework_device(load_vendor(vendor), framework)
    constraints = folder / _CONSTRAINTS
    file = constraints if constraints.is_file() else None
    device_index = device.index if index is None and wheels is None else None
    return Recipe(framework, (*spec.requires, *device.requires), file, index, wheels, device_index)


async def create(recipe: Recipe, path: Path, python: str, host: Host, report: Report) -> dict[str, str]:
    """Create an environment on a host, or bring an existing one up to date; returns its packages' versions.

    Raises HostError: it could not be created; the host and the first errors are named.
    """
    await host.connect()
    report(host.name, f"making {path}")
    constraints = b"" if recipe.constraints is None else recipe.constraints.read_bytes()
    prepare = ["sh", "-c", _PREPARE, "sh", str(path), python, _MARKER, _CONSTRAINTS]
    done = await host.run(prepare, constraints, _INSTALL_TIMEOUT_S)
    if done.code != 0:
        raise HostError(host.name, error_lines(done.output) if done.code not in (3, 4, 5) else done.message)
    spec, doing = load_framework(recipe.framework), f"installing the packages of {recipe.framework}"
    if recipe.device_index is not None:
        page = f"{recipe.device_index}/{spec.distributions[0]}/"
        if (await host.run([environment_python(path), "-c", _REACH, page], timeout_s=_INSTALL_TIMEOUT_S)).code != 0:
            doing += f", without the builds of {recipe.device_index}, which cannot be reached"
            recipe = replace(recipe, device_index=None)
    report(host.name, doing)
    done = await host.run(recipe.install_command(path), timeout_s=_INSTALL_TIMEOUT_S)
    if done.code != 0:
        why = error_lines(done.output) or f"exit code {done.code}"
        if unreached := _UNREACHED.search(done.output):
            cause = re.sub(r"<[^>]*>[:,] ", "", unreached[1])
            index = without_userinfo(recipe.index or "the package index")
            why = f"a connection to {index} failed: {cause}; {why}"
        raise HostError(host.name, f"{why} (repeat: {shlex.join(recipe.install_command(path))})")
    report(host.name, f"importing {spec.module}")
    names = distributions(Need(requirement=requirement, needed_by=spec.name) for requirement in recipe.requirements)
    imports = (spec.module, *spec.checked_imports)
    facts = await checks.package_facts(host, environment_python(path), [*names, *spec.distributions], imports)
    if not any(facts.versions[name] for name in spec.distributions):
        packages = " or ".join(spec.distributions)
        what = f"{path} has no {packages}: add the package to requires of {spec.name} in framework.yaml or vendor.yaml"
        raise HostError(host.name, what)
    for problem in checks.broken_imports(facts, spec, checks.create_command(recipe.framework, path)):
        raise HostError(host.name, problem.what)
    return {name: version for name, version in facts.versions.items() if version is not None}


async def remove(path: Path, host: Host) -> None:
    """Remove an environment that :func:`create` made; that it does not exist is not an error.

    Raises HostError: the directory was not made by AccelMark, or cannot be removed.
    """
    await host.connect()
    done = await host.run(["sh", "-c", _REMOVE, "sh", str(path), _MARKER], timeout_s=_INSTALL_TIMEOUT_S)
    if done.code != 0:
        raise HostError(host.name, done.message)


_HERE: Final = SubprocessHost(HostSpec(address="localhost"))


async def broken_frameworks() -> list[str]:
    """Return a line for each problem, with the command that repairs it; raises HostError: this Python cannot be run."""
    frameworks, vendor = readable("frameworks", load_framework)[0], default_vendor()

    async def broken_here(framework: FrameworkSpec) -> list[str]:
        facts = await checks.package_facts(_HERE, sys.executable, [], framework.checked_imports, python_path())
        broken = checks.broken_imports(facts, framework, checks.create_command(framework.name))
        return [f"{problem.what}: run {problem.hint}" for problem in broken]

    found = [broken_here(framework) for framework in frameworks.values()]
    known = [environment for environment in registered().values() if environment.framework in frameworks]
    found += [_broken_environment(environment, vendor) for environment in known]
    return [line for lines in await asyncio.gather(*found) for line in lines]


async def _broken_environment(environment: FrameworkEnvironment, vendor: str) -> list[str]:
    """Return the missing parts of an environment for a vendor's devices, and its modules that cannot be imported."""
    framework, path = load_framework(environment.framework), environment.path
    device = checks.known_device(vendor, framework.name)  # None is reported by the inventory
    requirements = (*framework.requires, *(device.requires if device is not None else ()))
    by = f"framework {framework.name}"
    needs = [*checks.RANK_NEEDS, *(Need(requirement=requirement, needed_by=by) for requirement in requirements)]
    python = environment_python(path)
    try:
        facts = await checks.package_facts(_HERE, python, distributions(needs), framework.checked_imports)
    except HostError as error:
        return [f"{error.what}: run {checks.create_command(framework.name, path)}"]
    problems = checks.package_problems(facts, needs, [], framework, path, device=device)
    return [f"{path}: {problem.what}: run {problem.hint}" for problem in problems]
