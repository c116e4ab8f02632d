"""Measure a cluster as a whole: collectives, scaling, checkpoints, and recovery from a killed rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

import accelmark
from accelmark.plan.plan import Plan
from accelmark.results.cluster import (
    CLUSTER_FILE,
    RECOVERY_DIR,
    SCALING_DIR,
    CheckpointWrites,
    ClusterReport,
    Part,
    Recovery,
    checkpoint_writes,
    disturbances_of,
    hosts_of_one_machine,
    recovery_of,
)
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.controller import coordinator
from accelmark.run.controller.data import DataFetcher
from accelmark.run.preflight.hosts import run_preflight
from accelmark.run.probe import probe
from accelmark.run.record.directory import require_empty
from accelmark.spec.errors import EXIT_CANCELLED, RunError, SpecError
from accelmark.spec.job import KilledRank, TrainJob
from accelmark.spec.log.records import Ceilings
from accelmark.spec.number_format import duration
from accelmark.spec.plugins.catalog import load_vendor

_CANCELLED: Final = "the measurement was cancelled"


@final
@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """What is measured on a cluster."""

    scaling: Plan
    """The same case on one host and on all hosts, with checkpoints."""
    recovery: Plan
    """The case on all hosts, with checkpoints."""
    kill_step: int
    """Optimizer steps after which the last rank is killed."""
    probe_budget_s: float
    working: Callable[[str], AbstractContextManager[Callable[[str], None]]]
    """Shows that a step without output of its own is in progress; yields what prints a line meanwhile."""
    as_json: bool = False


def measure(request: ClusterRequest, directory: Path) -> ClusterReport:
    """Measure all parts one after another in a new ``directory``, and write ``cluster.json`` there.

    A part that fails has a reason in the report instead of a value.

    Raises:
        RequestError: the directory is not empty.
        HostsNotReadyError: hosts were not ready for the first part (no directory is left), or for the trainings.
    """
    make_directory(directory)
    require_empty(directory)
    try:
        result = _measure(request, directory)
        write_atomic(directory / CLUSTER_FILE, result.model_dump_json(indent=2))
        return result
    finally:
        with contextlib.suppress(OSError):  # where nothing was measured
            directory.rmdir()


def _measure(request: ClusterRequest, directory: Path) -> ClusterReport:
    plan, reasons = request.scaling, dict[Part, str]()
    key, hosts = plan.jobs[-1].job.key, tuple(host.name for host in plan.cluster.hosts)
    rates: Ceilings | None = None
    if key.world_size < 2:
        reasons["collectives"] = "one rank needs no collectives"
    else:
        with (
            _reason_kept(reasons, "collectives"),
            request.working(f"measuring collectives for about {duration(request.probe_budget_s)}") as report,
        ):
            vendor, budget_s = load_vendor(plan.vendor), request.probe_budget_s
            rates = probe(vendor, key.hardware, key.nproc, ["collectives"], budget_s, plan.cluster, report)
    fetch = DataFetcher(plan.offline)
    scaling = coordinator.start(plan, directory / SCALING_DIR, fetch, run_preflight, as_json=request.as_json)
    failed = [case for case in scaling.summary.cases if case.state != "succeeded"]
    if scaling.exit_code == EXIT_CANCELLED:
        cancelled: tuple[Part, ...] = ("scaling", "checkpoints", "recovery")
        reasons |= dict.fromkeys(cancelled, _CANCELLED)
    elif failed or len(hosts) < 2:
        reasons["scaling"] = f"{failed[0].key}: {failed[0].state}" if failed else "the cluster has one host"
    last = directory / SCALING_DIR / plan.jobs[-1].directory
    writes: CheckpointWrites | None = None
    recovery: Recovery | None = None
    if "checkpoints" not in reasons:
        with _reason_kept(reasons, "checkpoints"):
            writes = checkpoint_writes(last)
        with _reason_kept(reasons, "recovery", SpecError):  # hosts are not ready
            recovery = _recover(request, directory / RECOVERY_DIR, fetch)
    resumed = directory / RECOVERY_DIR / request.recovery.jobs[0].directory
    disturbed: dict[Part, tuple[str, ...]] = {
        "scaling": disturbances_of(directory / SCALING_DIR / job.directory for job in plan.jobs),
        "collectives": rates.disturbed if rates is not None else (),
        "checkpoints": disturbances_of([last]),
        "recovery": disturbances_of([resumed / "attempt1", resumed]),
    }
    return ClusterReport(
        name=plan.cluster.name,
        hosts=hosts,
        nproc=key.nproc,
        vendor=plan.vendor,
        hardware=key.hardware,
        case=f"{key.model}:{key.framework}",
        measured_at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        accelmark_version=accelmark.__version__,
        collectives=rates,
        checkpoints=writes,
        recovery=recovery,
        reasons=reasons,
        disturbed={part: texts for part, texts in disturbed.items() if texts and part not in reasons},
        one_machine=hosts_of_one_machine(last),
    )


@contextlib.contextmanager
def _reason_kept(reasons: dict[Part, str], part: Part, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (RunError, *errors) as error:
        reasons[part] = str(error)


def _recover(request: ClusterRequest, path: Path, fetch: DataFetcher) -> Recovery:
    """Kill the last rank of a job, resume the run at once, and return how long that took."""
    (job,) = request.recovery.jobs
    rank, work = job.job.key.world_size - 1, job.job.work
    if not isinstance(work, TrainJob):
        raise RunError(f"{job.job.key}: only training by AccelMark recovers from a killed rank")
    killed = work.model_copy(update={"killed": KilledRank(rank=rank, step=request.kill_step)})
    job = job.model_copy(update={"job": job.job.model_copy(update={"work": killed})})
    plan = request.recovery.model_copy(update={"jobs": (job,)})
    with request.working("measuring recovery") as report:
        report(f"rank {rank} is killed on purpose after step {request.kill_step}, to measure the recovery")
    outcome = coordinator.start(plan, path, fetch, run_preflight, as_json=request.as_json)
    if outcome.exit_code == EXIT_CANCELLED:
        raise RunError(_CANCELLED)
    coordinator.resume(path, fetch, run_preflight, redo_failed=True, from_scratch=False, as_json=request.as_json)
    return recovery_of(path, job.directory, rank)
