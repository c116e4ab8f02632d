"""Launchers: how a node agent is started, followed and stopped on a host. One folder each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import Folder, find, folder_module, folders

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan
    from accelmark.run.launchers.launcher import Launcher
    from accelmark.spec.cluster import ClusterSpec


class SubmittedJob(NamedTuple):
    """The batch job of a run that has no directory (yet)."""

    number: str
    state: str
    may_start: bool
    """Whether the run may still start."""
    cancel: Callable[[], None]


def create_launcher(plan: Plan, run: Path) -> Launcher:
    """Return the launcher that a plan's cluster file names, for the run directory ``run``."""
    module: Any = folder_module(find("launchers", plan.cluster.launcher, "cluster file"), "launcher")
    launcher: Launcher = module.create(plan, run)
    return launcher


def submit_module(plan: Plan) -> Any:
    """Return ``submit.py`` of the plan's launcher, which runs AccelMark with ``arguments`` in a batch job.

    It has ``submit(plan, run, arguments) -> number of the job``, ``batch_script(plan, run, arguments) -> text`` and
    ``submitted(run) -> SubmittedJob | None``.

    Raises RequestError: the launcher submits no batch jobs.
    """
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
    return {name: folder for name, folder in folders("launchers").items() if (folder.path / "submit.py").is_file()}


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
