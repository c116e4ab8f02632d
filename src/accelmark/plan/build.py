"""Build the plan: all rounds of all keys, merged settings, and all checks that need no host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import accelmark
from accelmark.plan.adaptation import REQUIREMENTS_FILE, adaptation_files
from accelmark.plan.cluster import host_problems
from accelmark.plan.inference import plan_inference
from accelmark.plan.layering import Capabilities
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.plan.request import DataDirs, KeyRequest, PlannedWork, Planner
from accelmark.plan.training import plan_training
from accelmark.spec.catalog import Folder, find, framework_device, load_case, load_framework, load_vendor, tree_hash
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import DataError, Problem, RequestError, SpecError, nearest
from accelmark.spec.inference.engines import engine_file, known_engines
from accelmark.spec.job import JobSpec, framework_of
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.launcher import LauncherSpec, load_launcher
from accelmark.spec.plugins.requirements import Need, engine_requirements, requirement_names
from accelmark.spec.plugins.vendor import Chip, VendorSpec
from accelmark.spec.records import Ceilings
from accelmark.spec.runfile import CaseRequest, RunSpec


@final
@dataclass(frozen=True, slots=True)
class Detected:
    """Properties of the machine under test, detected without a framework."""

    vendor: str
    hardware: str
    """The chip's name for keys (``H100``, ``CPU``)."""
    chip: Chip | None
    num_devices: int | None
    """null if ranks are not bound to devices (a CPU)."""
    ceilings: Ceilings | None = None
    """Rates that ``accelmark probe`` measured on these devices; None without a probe."""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    """Detected capability of this machine (``amx_bf16``) -> the file that shows it."""


PLANNERS: Final[Mapping[str, Planner]] = {"train": plan_training, "infer": plan_inference}
"""Task of a request -> its planner."""


def build_plan(
    request: RunSpec,
    *,
    cluster: ClusterSpec,
    detected: Detected,
    data_dirs: DataDirs,
    created_at: str,
    where: str,
    command_line: Mapping[str, Any] | None = None,
) -> Plan:
    """Resolve ``request`` into a plan.

    Args:
        request: the run file.
        cluster: the cluster that the request names.
        detected: the chip under test.
        data_dirs: returns the directories of a case's data.
        created_at: UTC time, ISO 8601.
        where: the run file, or ``command line``, for errors.
        command_line: dotted settings from the command line, the strongest layer.

    Raises:
        SpecError: with all problems of all keys.
        RequestError: no case can run on this vendor's chips.
    """
    vendor_name = request.vendor or cluster.vendor or detected.vendor
    vendor = load_vendor(vendor_name)
    vendor.require_runnable()
    planner = _Planner(
        is_open=request.open,
        cluster=cluster,
        detected=detected,
        vendor=vendor,
        vendor_folder=find("vendors", vendor_name, where),
        data_dirs=data_dirs,
        where=where,
        command_line=command_line or {},
        launcher=load_launcher(cluster.launcher),
        problems=host_problems(cluster),
    )
    for case_request in request.cases:
        planner.add(case_request)
    if planner.problems:
        raise SpecError(dict.fromkeys(planner.problems))
    return Plan(
        name=request.name,
        created_at=created_at,
        accelmark_version=accelmark.__version__,
        source_sha256=tree_hash(Path(accelmark.__file__).parent),
        vendor=vendor_name,
        vendor_sha256=tree_hash(planner.vendor_folder.path),
        open=request.open,
        strict=request.strict,
        fail_fast=request.fail_fast,
        timeout_s=request.timeout_s,
        stall_timeout_s=request.stall_timeout_s,
        telemetry_interval_s=request.telemetry_interval_s,
        retry_lost=request.retry_lost,
        log_level=request.log_level,
        cluster=cluster,
        jobs=tuple(planner.jobs),
        warnings=tuple(dict.fromkeys(planner.warnings)),
    )


@final
@dataclass(slots=True)
class _Planner:
    """Plans keys one by one and collects their problems."""

    is_open: bool
    cluster: ClusterSpec
    launcher: LauncherSpec
    detected: Detected
    vendor: VendorSpec
    vendor_folder: Folder
    data_dirs: DataDirs
    where: str
    command_line: Mapping[str, Any]
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    jobs: list[PlannedJob] = field(default_factory=list)
    planned: dict[str, str] = field(default_factory=dict)

    def add(self, request: CaseRequest) -> None:
        """Plan all rounds of one key, or record its problems."""
        try:
            self._add(CaseKey.parse(request.key, hardware=self.detected.hardware, where=self.where), request)
        except SpecError as error:
            self.problems.extend(error.problems)
        except DataError as error:
            hint = "add data: DIRECTORY next to the key, or --data DIRECTORY"
            self.problems.append(Problem(self.where, request.key, str(error), hint))
        except RequestError as error:
            self.problems.append(Problem(self.where, request.key, str(error).removeprefix(f"{self.where}: ")))

    def _add(self, key: CaseKey, request: CaseRequest) -> None:
        chip = self._chip(key)
        asked = KeyRequest(
            key=key,
            request=request,
            folder=find("cases", key.model, self.where),
            case=load_case(key.model),
            vendor=self.vendor.name,
            vendor_folder=self.vendor_folder.path,
            capabilities=self._capabilities(chip),
            is_open=self.is_open,
            where=self.where,
            command_line=self.command_line,
            data_dirs=self.data_dirs,
        )
        planned = PLANNERS[request.task](asked)
        self._check_scale(key, request.key, planned.directory)
        self._check_engine(key, planned.engine)
        self.warnings += [f"{key}: {warning}" for warning in planned.warnings]
        first = self._job(asked, planned, chip)
        nodes = _nodes(first, self.cluster)
        requires, installs = tuple(self._needs(asked, planned, first.framework)), _installed_for_ranks(asked)
        self.jobs += [
            PlannedJob(
                directory=f"{planned.directory}/round{number}",
                job=first.model_copy(update={"round": number, "work": planned.work.for_round(number)}),
                requires=requires,
                installs=installs,
                layer_files=planned.layer_files,
                nodes=nodes,
            )
            for number in range(1, key.repeat + 1)
        ]

    def _needs(self, asked: KeyRequest, planned: PlannedWork, framework: str) -> Iterator[Need]:
        """Yield the packages that case, framework and work need."""
        declared = {f"case {asked.key.model}": asked.case.requires}
        declared[f"framework {framework}"] = load_framework(framework).requires
        if planned.engine is not None:
            files = (engine_file(folder, planned.engine) for folder in (None, self.vendor_folder.path))
            found = (engine_requirements(file) for file in files if file is not None)
            declared[f"engine {planned.engine}"] = tuple(one for each in found for one in each)
        for needed_by, requirements in (declared | dict(planned.requires)).items():
            yield from (Need(requirement=one, needed_by=needed_by) for one in requirements)

    def _capabilities(self, chip: Chip | None) -> Capabilities:
        """Return the device's capabilities from ``vendor.yaml`` and from detection on this machine."""
        named = (*chip.capabilities, *(["fp8"] if chip.peaks.fp8 is not None else [])) if chip is not None else ()
        sources = dict.fromkeys(named, f"vendor.yaml, chip {chip.name}") if chip is not None else {}
        if self.launcher.is_localhost and self.vendor.name == self.detected.vendor:
            return Capabilities({**self.detected.capabilities, **sources})
        if not self.vendor.capabilities:
            return Capabilities(sources)
        return Capabilities(
            sources, "those of other machines are not detected: list them under the chip in vendor.yaml"
        )

    def _check_engine(self, key: CaseKey, name: str | None) -> None:
        """Reject an unknown engine if the ranks use this Python environment; another one may have it."""
        known = known_engines(self.vendor_folder.path)
        if name is None or name in known:
            return
        close = nearest(name, known)
        if self.launcher.is_localhost and self.cluster.container is None:
            raise SpecError([Problem(self.where, "compiler", f"unknown engine {name!r}", close)])
        self.warnings.append(f"{key}: no engine {name!r} is known here ({close}): the hosts must have it")

    def _job(self, asked: KeyRequest, planned: PlannedWork, chip: Chip | None) -> JobSpec:
        """Return the first round of a key."""
        adaptation, key = asked.adaptation, asked.key
        extern = Folder(adaptation.name, adaptation, None, self.vendor.name)
        name = framework_of(planned.work, key)
        device = framework_device(self.vendor, name)
        return JobSpec(
            work=planned.work,
            key=key,
            ranks_per_host=load_framework(name).ranks_per_host(key.nproc),
            round=1,
            case=asked.folder.ref(),
            case_version=asked.case.version,
            vendor=self.vendor.name,
            device_type=device.device_type,
            framework_module=device.module,
            vendor_environment=self.vendor.environment,
            collective_backend=device.collective_backend,
            extern=extern.ref() if (adaptation / "extern").is_dir() else None,
            adaptation=adaptation_files(adaptation),
            ceilings=self.detected.ceilings if self.vendor.name == self.detected.vendor else None,
            chip=chip,
            data_dirs=dict(planned.data_dirs),
            checkpoint_dir=Path("checkpoints"),
            open=self.is_open,
            provenance=dict(planned.provenance),
        )

    def _chip(self, key: CaseKey) -> Chip | None:
        """Return the detected chip if the key names it, else the only chip of that name, else None."""
        if self.vendor.name == self.detected.vendor:
            if key.hardware.lower() == self.detected.hardware.lower():
                return self.detected.chip
            self.warnings.append(f"{key}: names {key.hardware}, but this machine has {self.detected.hardware}")
        named = [chip for chip in self.vendor.chips if key.hardware.lower() in _names(chip)]
        if not named:
            self.warnings.append(f"{key}: {self.vendor.name} describes no chip {key.hardware}; MFU will be null")
        return named[0] if len(named) == 1 else None

    def _check_scale(self, key: CaseKey, written: str, directory: str) -> None:
        problems: list[Problem] = []
        if key.nnodes > len(self.cluster.hosts):
            what = f"asks for {key.nnodes} hosts, the cluster {self.cluster.name!r} has {len(self.cluster.hosts)}"
            problems.append(Problem(self.where, written, what))
        used = self.cluster.hosts[: key.nnodes]
        without = [host.name for host in used if not host.service_ports]
        if without and len(without) < len(used):
            what = f"{', '.join(without)} has no service_ports, but other hosts of the job have"
            problems.append(Problem(self.where, written, what, "give every host at least one, or none any"))
        here = self.launcher.is_localhost and self.vendor.name == self.detected.vendor
        devices = self.detected.num_devices if here else None
        if devices is not None and key.nproc > devices:
            what = f"asks for {key.nproc} devices a host, this one has {devices}"
            problems.append(Problem(self.where, written, what))
        if directory in self.planned:
            what = f"is requested twice (also as {self.planned[directory]!r})"
            problems.append(Problem(self.where, written, what, "raise its repeat instead"))
        if problems:
            raise SpecError(problems)
        self.planned[directory] = written


def _installed_for_ranks(asked: KeyRequest) -> tuple[str, ...]:
    """Return the packages of the ``requirements.txt`` of the adaptation, else of the case."""
    for folder in (asked.adaptation, asked.folder.path):
        file = folder / REQUIREMENTS_FILE
        if file.is_file():
            return tuple(requirement_names(file))
    return ()


def _names(chip: Chip) -> tuple[str, str]:
    return chip.name.lower(), f"{chip.name}-{chip.variant}".lower()


def _nodes(job: JobSpec, cluster: ClusterSpec) -> tuple[PlannedNode, ...]:
    key = job.key
    command = ("python", "-m", job.work.rank_module, "job.json")
    return tuple(
        PlannedNode(host=host.name, noderank=noderank, nproc=key.nproc, command=command)
        for noderank, host in enumerate(cluster.hosts[: key.nnodes])
    )
