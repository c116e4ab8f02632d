"""The environments of this machine, recorded in AccelMark's cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from accelmark.datasets.ensure import cache_directory
from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.spec.cluster import environment_python
from accelmark.spec.errors import RequestError
from accelmark.spec.model import Spec
from accelmark.spec.plugins.launcher import load_launcher

_PLACE: Final = "environments"


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
    environments: dict[str, FrameworkEnvironment] = {}
    for record in sorted((cache_directory() / _PLACE).glob("*.json")):
        try:
            environment = FrameworkEnvironment.model_validate_json(record.read_bytes())
        except (OSError, ValidationError):
            continue
        environments[environment.framework] = environment
    return environments


def register(environment: FrameworkEnvironment) -> None:
    """Record an environment, in place of an earlier one of its framework."""
    record = _record(environment.framework)
    make_directory(record.parent)
    write_atomic(record, environment.model_dump_json(indent=2))


def unregister(framework: str) -> None:
    """Remove the record of a framework's environment."""
    _record(framework).unlink(missing_ok=True)


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


def _record(framework: str) -> Path:
    return cache_directory() / _PLACE / f"{framework}.json"
