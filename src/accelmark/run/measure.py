"""Measure devices: of this machine, or of the hosts of a cluster together; and a cluster as a whole.

Of a cluster: collectives, scaling, checkpoints, and recovery from a killed rank.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import psutil

import accelmark
from accelmark.datasets.ensure import cache_directory
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
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
from accelmark.results.read.round_dir import node_dirs, read_json
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.controller.data import DataFetcher
from accelmark.run.controller.execution import Cancellation, execute_job, run_until_signal
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.preflight.hosts import Preflight, missing_here, require_ready, run_preflight
from accelmark.run.record.directory import RunDirectory, require_empty, safe_name
from accelmark.run.record.states import utc_now
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import EXIT_CANCELLED, RunError, SpecError
from accelmark.spec.job import JobSpec, KilledRank, ProbeJob, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.log.records import CEILINGS_FILE, Ceilings, ProbeItem
from accelmark.spec.number_format import duration
from accelmark.spec.plugins.catalog import FolderRef, framework_device, load_framework, load_vendor
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.requirements import Need
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.telemetry.host import BUSY_CPU


def probe(
    vendor: VendorSpec,
    hardware: str,
    nproc: int,
    items: Sequence[ProbeItem],
    budget_s: float,
    cluster: ClusterSpec | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Ceilings:
    """Measure ``nproc`` devices of this machine, or of each host of ``cluster`` together.

    ``report`` receives what the launcher waits for. The result of this machine is cached for later runs; that of a busy
    host is marked, and does not replace one of an idle host.

    Raises HostsNotReadyError: a host is not ready. Raises RunError: a rank failed; its reason is given.
    """
    spec = cluster or ClusterSpec()

    async def run_job() -> None:
        (job,) = run.plan.jobs
        async with create_launcher(run.plan, run.path) as launcher:
            launcher.report = report
            is_here, preflight = launcher.spec.is_localhost, Preflight(launcher, (job,))
            require_ready(await (missing_here(launcher) if is_here else preflight.run()), run.plan)
            state, reason = await execute_job(job, launcher, lambda *_: None, Cancellation())
            if state != "succeeded":
                raise RunError(f"the probe {state.replace('_', ' ')}: {reason}")

    # Hosts that share the file system have to see the directory.
    place = Path.cwd() if spec.launcher != "local" and load_launcher(spec.launcher).shares_filesystem else None
    with tempfile.TemporaryDirectory(prefix="accelmark-probe-", dir=place) as directory:
        plan = _plan(vendor, hardware, nproc, ProbeJob(items=tuple(items), budget_s=budget_s), spec)
        run = RunDirectory.create(Path(directory) / "run", plan)
        run_until_signal(run_job())
        nodes = node_dirs(run.round_dir(plan.jobs[0]))
        ceilings = Ceilings.stored(nodes[0].path / CEILINGS_FILE)
        if ceilings is None:
            raise RunError("the probe wrote no result")
        disturbed: list[str] = []
        for node in nodes:  # other load on a host before and during the probe
            where = "" if node.host == "localhost" else f"{node.host}: "
            info, ended = read_json(node.path / "sys_info.json"), node.exit
            disturbed += [f"{where}{reason}" for reason in info.get("busy_at_start") or ()]
            num_cores = (info.get("cpu") or {}).get("num_cores") or psutil.cpu_count() or 1
            if ended is not None and (others_s := ended.others_cpu_s or 0.0) > BUSY_CPU * ended.duration_s * num_cores:
                used = f"other processes used {others_s:.1f} s of CPU time in {ended.duration_s:.1f} s"
                disturbed.append(f"{where}{used}")
        ceilings = ceilings.model_copy(update={"disturbed": tuple(disturbed)})
    if cluster is not None:
        return ceilings
    path = _cache_path(vendor.name, hardware) / f"x{nproc}.json"
    earlier = Ceilings.stored(path)
    if not ceilings.disturbed or earlier is None or earlier.disturbed:
        make_directory(path.parent)
        write_atomic(path, ceilings.model_dump_json(indent=2))
    return ceilings


def remembered(vendor: str, hardware: str) -> Ceilings | None:
    """Return the cached result of these devices on this host, or None.

    Results of an idle host come first, then those with the fewest ranks.
    """
    paths = sorted(_cache_path(vendor, hardware).glob("x*.json"), key=lambda path: (len(path.name), path.name))
    known = [ceilings for path in paths if (ceilings := Ceilings.stored(path)) is not None and ceilings.matmul]
    return next((ceilings for ceilings in known if not ceilings.disturbed), known[0] if known else None)


def _cache_path(vendor: str, hardware: str) -> Path:
    return cache_directory() / "probes" / safe_name(socket.gethostname()) / f"{safe_name(vendor)}-{safe_name(hardware)}"


def _plan(vendor: VendorSpec, hardware: str, nproc: int, probe: ProbeJob, cluster: ClusterSpec) -> Plan:
    names = tuple(host.name for host in cluster.hosts)
    # "pytorch" is the framework in which accelmark.probe measures.
    key = CaseKey(model="probe", framework="pytorch", hardware=hardware, nnodes=len(names), nproc=nproc)
    device = framework_device(vendor, key.framework)
    job = JobSpec(
        work=probe.model_copy(update={"hosts": names}),
        key=key,
        round=1,
        case=FolderRef(name="probe", path=Path(accelmark.__file__).parent / "probe", sha256=""),
        case_version=1,
        vendor=vendor.name,
        device_type=device.device_type,
        framework_module=device.module,
        collective_backend=device.collective_backend,
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
    )
    command = tuple(module_command("python", probe.rank_module, "job.json"))
    nodes = tuple(
        PlannedNode(host=name, noderank=noderank, nproc=nproc, command=command) for noderank, name in enumerate(names)
    )
    wanted = (*load_framework(key.framework).requires, *device.requires)
    requires = tuple(Need(requirement=requirement, needed_by="accelmark probe") for requirement in wanted)
    jobs = (PlannedJob(directory="probe/round1", job=job, nodes=nodes, requires=requires),)
    changed = {"name": "probe", "created_at": utc_now(), "vendor": vendor.name, "open": True, "jobs": jobs}
    return plan_of_hosts(cluster).model_copy(update=changed)


_CANCELLED: Final = "the measurement was cancelled"


class ClusterRequest(NamedTuple):
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

    Raises RequestError: the directory is not empty. Raises HostsNotReadyError: hosts were not ready.
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
    from accelmark.run.controller import coordinator  # imports NumPy, which planning does not need

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
        with _reason_kept(reasons, "recovery", (RunError, SpecError)):  # hosts are not ready
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
def _reason_kept(
    reasons: dict[Part, str], part: Part, errors: tuple[type[Exception], ...] = (RunError,)
) -> Iterator[None]:
    try:
        yield
    except errors as error:
        reasons[part] = str(error)


def _recover(request: ClusterRequest, path: Path, fetch: DataFetcher) -> Recovery:
    """Kill the last rank of a job, resume the run at once, and return how long that took."""
    from accelmark.run.controller import coordinator

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
