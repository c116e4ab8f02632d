"""Building the plan: keys x rounds, layered settings, every check that needs no host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import accelmark
from accelmark.plan.adaptation import adaptation_files
from accelmark.plan.cluster import host_problems
from accelmark.plan.data import DataDirs
from accelmark.plan.inference import command_line_layer, inference_data, inference_side, job_of, resolve_layers, slug
from accelmark.plan.layering import case_layer, vendor_layers
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.spec.case import CaseSpec, TrainCaseSpec
from accelmark.spec.catalog import Folder, find, folders, framework_device, load_case, load_vendor, tree_hash
from accelmark.spec.ceilings import Ceilings
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.engines import known_engines
from accelmark.spec.errors import DataError, Problem, RequestError, SpecError, nearest
from accelmark.spec.job import JobSpec, Provenance
from accelmark.spec.key import CaseKey
from accelmark.spec.launcher import LauncherSpec, load_launcher
from accelmark.spec.layers import Layer, Resolved, resolve
from accelmark.spec.runfile import CaseRequest, RunSpec
from accelmark.spec.vendor import Chip, VendorSpec
from accelmark.spec.work import TrainJob, Work


@final
@dataclass(frozen=True, slots=True)
class Detected:
    """What was found on the machine under test, without a framework."""

    vendor: str
    hardware: str
    """The chip's name for keys (``H100``, ``CPU``)."""
    chip: Chip | None
    num_devices: int | None
    """null where ranks are not bound to devices (a CPU)."""
    ceilings: Ceilings | None = None
    """What ``accelmark probe`` measured of these devices, if it did."""


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
        request: what is asked for.
        cluster: the cluster that it names, read already.
        detected: the chip under test.
        data_dirs: where each case's data is.
        created_at: UTC time, ISO 8601.
        where: the run file, or ``command line``, for errors.
        command_line: dotted settings given on the command line, the strongest layer.

    Raises:
        SpecError: with every problem of every key at once.
        RequestError: nothing can run on this vendor's chips.
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
    """Plans one key after another; what is wrong with one never hides what is wrong with the next."""

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
        """Plan all rounds of one key, or note its problems."""
        try:
            key = CaseKey.parse(request.key, hardware=self.detected.hardware, where=self.where)
            if request.task == "infer":
                self.jobs.extend(self._inference(key, request))
                return
            self._check_scale(key, request.key, key.slug)
            folder, case, train = _training_case(key, self.where)
            resolved = self._resolve(key, folder, train, request)
            self.jobs.extend(self._rounds(key, folder, case, train, resolved, request.data))
        except SpecError as error:
            self.problems.extend(error.problems)
        except DataError as error:
            hint = "with data: DIRECTORY beside the key, or --data DIRECTORY"
            self.problems.append(Problem(self.where, request.key, str(error), hint))
        except RequestError as error:
            self.problems.append(Problem(self.where, request.key, str(error).removeprefix(f"{self.where}: ")))

    def _adaptation(self, key: CaseKey) -> Path:
        return self.vendor_folder.path / "cases" / f"{key.model}-{key.framework}"

    def _resolve(self, key: CaseKey, folder: Folder, train: TrainCaseSpec, request: CaseRequest) -> Resolved:
        over = [
            *vendor_layers(self._adaptation(key), self.vendor.name, key),
            Layer.of(self.where, request.settings),
            Layer("command line", self.command_line),
        ]
        return resolve(case_layer(folder, train), over, mutable=train.mutable, is_open=self.is_open)

    def _rounds(
        self,
        key: CaseKey,
        folder: Folder,
        case: CaseSpec,
        train: TrainCaseSpec,
        resolved: Resolved,
        data: Path | None,
    ) -> list[PlannedJob]:
        units = train.units_per_sample
        if train.units_per_sample_key is not None:
            units = int(str(resolved.settings.model[train.units_per_sample_key]))
        side = TrainJob(
            unit=train.unit,
            units_per_sample=units,
            target=train.target,
            reference_loss=train.reference_loss,
            min_repeats=train.min_repeats,
            settings=resolved.settings,
        )
        data_dirs = {} if resolved.settings.loader.synthetic else dict(self.data_dirs(case, data))
        return self._repeated(key.slug, self._job(key, folder, case, data_dirs, resolved.provenance, side))

    def _inference(self, key: CaseKey, request: CaseRequest) -> list[PlannedJob]:
        folder = find("cases", key.model, self.where)
        case = load_case(key.model)
        side = inference_side(key, folder, case, self.where)
        requests = [Layer.of(self.where, request.settings), command_line_layer(self.command_line)]
        resolved = resolve_layers(side, folder, self._adaptation(key), self.vendor.name, requests)
        directory = slug(key, resolved.settings)
        self._check_scale(key, request.key, directory)
        self._check_engine(key, resolved.settings.compiler)
        data_dirs, warnings = inference_data(side, case, resolved.settings, self.data_dirs, request.data)
        self.warnings += [f"{key}: {note.what}" for note in resolved.notes if note.severity == "warning"]
        self.warnings += [f"{key}: {warning}" for warning in warnings]
        first = self._job(key, folder, case, data_dirs, resolved.provenance, job_of(side, resolved))
        return self._repeated(directory, first)

    def _check_engine(self, key: CaseKey, name: str | None) -> None:
        """Refuse an engine that is not known where this Python is the ranks' own; elsewhere they may have it."""
        known = known_engines(self.vendor_folder.path)
        if name is None or name in known:
            return
        close = nearest(name, known)
        if self.launcher.is_localhost and self.cluster.container is None:
            raise SpecError([Problem(self.where, "compiler", f"unknown engine {name!r}", close)])
        self.warnings.append(f"{key}: no engine {name!r} is known here ({close}): the hosts must have it")

    def _job(
        self,
        key: CaseKey,
        folder: Folder,
        case: CaseSpec,
        data_dirs: dict[str, Path],
        provenance: Mapping[str, Provenance],
        work: Work,
    ) -> JobSpec:
        """Return the first round of a key."""
        adaptation = self._adaptation(key)
        device = framework_device(self.vendor, key.framework)
        extern = Folder(adaptation.name, adaptation, None, self.vendor.name)
        return JobSpec(
            work=work,
            key=key,
            round=1,
            case=folder.ref(),
            case_version=case.version,
            vendor=self.vendor.name,
            device_type=device.device_type,
            framework_module=device.module,
            vendor_environment=self.vendor.environment,
            collective_backend=device.collective_backend,
            extern=extern.ref() if (adaptation / "extern").is_dir() else None,
            adaptation=adaptation_files(adaptation),
            ceilings=self.detected.ceilings if self.vendor.name == self.detected.vendor else None,
            chip=self._chip(key),
            data_dirs=data_dirs,
            checkpoint_dir=Path("checkpoints"),
            open=self.is_open,
            provenance=dict(provenance),
        )

    def _repeated(self, directory: str, first: JobSpec) -> list[PlannedJob]:
        nodes = _nodes(first, self.cluster)
        return [
            PlannedJob(
                directory=f"{directory}/round{number}",
                job=first.model_copy(update={"round": number, "work": first.work.for_round(number)}),
                nodes=nodes,
            )
            for number in range(1, first.key.repeat + 1)
        ]

    def _chip(self, key: CaseKey) -> Chip | None:
        """Return the detected chip where the key means it, else the one chip of that name; never one of several."""
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
            what = f"stands twice (also as {self.planned[directory]!r})"
            problems.append(Problem(self.where, written, what, "raise its repeat instead"))
        if problems:
            raise SpecError(problems)
        self.planned[directory] = written


def _training_case(key: CaseKey, where: str) -> tuple[Folder, CaseSpec, TrainCaseSpec]:
    folder = find("cases", key.model, where)
    case = load_case(key.model)
    if case.train is None:
        trainable = [name for name in folders("cases") if load_case(name).train is not None]
        what = f"the case {key.model!r} has no training side; those that have: {', '.join(trainable)}"
        raise SpecError([Problem(where, str(key), what)])
    if not (folder.path / f"{key.framework}.py").is_file():
        present = [file.stem for file in folder.path.glob("*.py") if not file.stem.startswith(("_", "infer"))]
        what = f"the case {key.model!r} has no framework {key.framework!r}"
        raise SpecError([Problem(where, str(key), what, nearest(key.framework, present))])
    return folder, case, case.train


def _names(chip: Chip) -> tuple[str, str]:
    return chip.name.lower(), f"{chip.name}-{chip.variant}".lower()


def _nodes(job: JobSpec, cluster: ClusterSpec) -> tuple[PlannedNode, ...]:
    key = job.key
    command = ("python", "-m", job.work.rank_module, "job.json")
    return tuple(
        PlannedNode(host=host.name, noderank=noderank, nproc=key.nproc, command=command)
        for noderank, host in enumerate(cluster.hosts[: key.nnodes])
    )
