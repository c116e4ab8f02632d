"""Launchers: how a node agent is started, followed and stopped on a host. One folder each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import Folder, find, folder_module, folders

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan
    from accelmark.run.launchers.launcher import Launcher
    from accelmark.spec.cluster import ClusterSpec


SUBMIT_FILE: Final = "submit.py"
"""Optional file of a launcher's folder, with ``submit(plan, run, arguments) -> number of the job``,
``batch_script(plan, run, arguments) -> text`` and ``submitted(run) -> SubmittedJob | None``."""


@final
@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The batch job of a run that has no directory (yet)."""

    number: str
    state: str
    may_start: bool
    """Whether the run may still start."""
    cancel: Callable[[], None]


def create_launcher(plan: Plan, run: Path) -> Launcher:
    """Return the launcher that a plan's cluster file names, for the run directory ``run``."""
    launcher: Launcher = folder_module(find("launchers", plan.cluster.launcher, "cluster file"), "launcher").create(
        plan, run
    )
    return launcher


def submit(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Submit AccelMark with ``arguments``, which start the run at ``run``, as a batch job; returns its number.

    Raises:
        RequestError: the plan's launcher submits no batch jobs, or does not know a host.
        RunError: the job was refused.
    """
    number: str = _submit_module(plan).submit(plan, run, arguments)
    return number


def batch_script(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Return the batch script that :func:`submit` would submit.

    Raises RequestError: the plan's launcher submits no batch jobs.
    """
    script: str = _submit_module(plan).batch_script(plan, run, arguments)
    return script


def _submit_module(plan: Plan) -> Any:
    folder, able = find("launchers", plan.cluster.launcher, "cluster file"), _submitting()
    if folder.name not in able:
        raise RequestError(
            f"--submit: launcher {folder.name} submits no batch jobs; set launcher in the cluster: {', '.join(able)}"
        )
    return folder_module(folder, "submit")


def submitted(run: Path) -> SubmittedJob | None:
    """Return the batch job of a run that has no directory (yet); None where it was not submitted."""
    answers = (folder_module(folder, "submit").submitted(run) for folder in _submitting().values())
    return next((job for job in answers if job is not None), None)


def _submitting() -> dict[str, Folder]:
    return {name: folder for name, folder in folders("launchers").items() if (folder.path / SUBMIT_FILE).is_file()}


def plan_of_hosts(cluster: ClusterSpec) -> Plan:
    """Return a plan without jobs on a cluster."""
    import accelmark
    from accelmark.plan.plan import Plan

    return Plan(
        name="hosts",
        created_at="",
        accelmark_version=accelmark.__version__,
        source_sha256="",
        vendor=cluster.vendor or "cpu",
        vendor_sha256="",
        cluster=cluster,
        jobs=(),
    )
