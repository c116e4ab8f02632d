"""Build the plan: all rounds of all keys, merged settings, and all checks that need no host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import accelmark
from accelmark.plan.adaptation import Capabilities, adaptation_files, requirements_file
from accelmark.plan.inference import plan_inference
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.plan.request import DataDirs, Detected, KeyRequest, PlannedWork, RunRequest
from accelmark.plan.serving import plan_serving
from accelmark.plan.training import plan_training
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import Problem, RequestError, SpecError, nearest
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import engine_specs, find, known_engines, load_framework, load_vendor, tree_hash
from accelmark.spec.plugins.launcher import load_launcher, unusable_parts
from accelmark.spec.plugins.requirements import Need, installed_version, requirement_names
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.runfile import CaseRequest, RunOptions, RunSpec

_PLANNERS: Final = {"train": plan_training, "infer": plan_inference, "serve": plan_serving}


def build_plan(
    request: RunSpec,
    *,
    cluster: ClusterSpec,
    detected: Detected,
    data_dirs: DataDirs,
    created_at: str,
    where: str,
    command_line: Mapping[str, Any] | None = None,
    allow_missing_data: bool = False,
) -> Plan:
    """Resolve ``request`` into a plan.

    ``where`` (the run file, or ``command line``) is for errors; ``command_line`` has dotted settings, the last layer.
    ``allow_missing_data``: list missing data, devices and framework versions in the plan instead of raising.

    Raises SpecError with all problems of all keys, RequestError if no case can run on this vendor's chips.
    """
    launcher = load_launcher(cluster.launcher)
    vendor_name = request.vendor or cluster.vendor or (detected.vendor if launcher.is_localhost else None)
    if vendor_name is None:
        what = f"{where}: cluster {cluster.name!r} names no vendor, and devices of other machines are not detected"
        raise RequestError(
            f"{what}: add 'vendor: NAME' to the cluster file ({detected.vendor} is that of this machine)"
        )
    vendor = load_vendor(vendor_name)
    if vendor.cannot_run is not None:
        raise RequestError(f"vendor {vendor.name}: nothing can run on it yet: {vendor.cannot_run}")
    run = RunRequest(
        options=request,
        cluster=cluster,
        launcher=launcher,
        vendor=vendor,
        vendor_folder=find("vendors", vendor_name, where).path,
        detected=detected,
        where=where,
        command_line=command_line or {},
        data_dirs=data_dirs,
    )
    planner = _Planner(run, unusable_parts(cluster))
    if detected.others and run.is_here:
        also = ", ".join(detected.others)
        planner.warnings.append(
            f"this machine also has devices of {also}; {vendor_name} is measured: choose with --vendor"
        )
    if cluster.container is not None and not CONTAINER_ENGINES[cluster.container.engine].is_tried:
        planner.warnings.append(
            f"container.engine: {cluster.container.engine} was not tried with AccelMark; its commands follow its "
            "documentation: look at them with --dry-run"
        )
    for case_request in request.cases:
        planner.add(case_request)
    if planner.problems or (planner.missing and not allow_missing_data):
        raise SpecError(dict.fromkeys([*planner.problems, *planner.missing]))
    return Plan(
        **{name: getattr(request, name) for name in RunOptions.model_fields},
        name=request.name,
        created_at=created_at,
        accelmark_version=accelmark.__version__,
        source_sha256=tree_hash(Path(accelmark.__file__).parent),
        vendor=vendor_name,
        vendor_sha256=tree_hash(run.vendor_folder),
        vendor_folder=run.vendor_folder,
        cluster=cluster,
        jobs=tuple(planner.jobs),
        missing_data=tuple(dict.fromkeys(planner.missing)),
        warnings=tuple(dict.fromkeys(planner.warnings)),
    )


@final
@dataclass(slots=True)
class _Planner:
    """Plans keys one by one and collects their problems."""

    run: RunRequest
    problems: list[Problem]
    missing: list[Problem] = field(default_factory=list)
    """Data that the user has to give and has not; devices and versions that this machine has not."""
    warnings: list[str] = field(default_factory=list)
    jobs: list[PlannedJob] = field(default_factory=list)
    planned: dict[str, str] = field(default_factory=dict)
    """Directory of a key's rounds -> the key as written."""

    def add(self, request: CaseRequest) -> None:
        """Plan all rounds of one key, or record its problems."""
        where = self.run.where
        try:
            key = CaseKey.parse(request.key, hardware=self.run.detected.hardware, where=where)
        except SpecError as error:
            self.problems.extend(error.problems)
            return
        self.problems.extend(self._scale_problems(key, request.key))
        self._check_devices(key, request.key)
        try:
            self._add(key, request)
        except SpecError as error:
            self.problems.extend((*error.problems, *self._further_problems(key, request)))
        except RequestError as error:
            self.problems.append(Problem(where, request.key, str(error).removeprefix(f"{where}: ")))
            self.problems.extend(self._further_problems(key, request))

    def _further_problems(self, key: CaseKey, request: CaseRequest) -> Iterator[Problem]:
        """Yield the problems of data and engine, which planning a key that has others does not come to."""
        if request.data is not None and self.run.launcher.is_localhost and not request.data.exists():
            yield Problem(self.run.where, request.key, f"the data directory {request.data} is missing", "correct data")
        engine = self.run.command_line.get("compiler", request.settings.get("compiler"))
        if request.task == "infer" and isinstance(engine, str):
            try:
                self._check_engine(key, engine)
            except SpecError as error:
                yield from error.problems

    def _add(self, key: CaseKey, request: CaseRequest) -> None:
        chip = self._chip(key)
        folder, case = find("cases", key.model, self.run.where), catalog.load_case(key.model)
        asked = KeyRequest(self.run, key, request, folder, case, self._capabilities(chip), self.missing)
        planned = _PLANNERS[request.task](asked)
        self._check_repeated(request.key, planned.directory)
        self._check_version(key)
        self._check_engine(key, planned.engine)
        self.warnings += [f"{key}: {warning}" for warning in planned.warnings]
        first = _first_round(asked, planned, chip)
        command = ("python", "-m", planned.work.rank_module, "job.json")
        hosts = enumerate(self.run.cluster.hosts[: key.nnodes])
        nodes = tuple(PlannedNode(host=host.name, noderank=n, nproc=key.nproc, command=command) for n, host in hosts)
        requires, installs = tuple(_needs(asked, planned, first.framework)), _installed_for_ranks(asked)
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

    def _capabilities(self, chip: Chip | None) -> Capabilities:
        """Return the device's capabilities from ``vendor.yaml`` and from detection on this machine."""
        named = (*chip.capabilities, *(["fp8"] if chip.peaks.fp8 is not None else [])) if chip is not None else ()
        sources = dict.fromkeys(named, f"vendor.yaml, chip {chip.name}") if chip is not None else {}
        if self.run.is_here:
            return Capabilities({**self.run.detected.capabilities, **sources})
        unknown = "those of other machines are not detected: list them under the chip in vendor.yaml"
        return Capabilities(sources, unknown if self.run.vendor.capabilities else None)

    def _check_version(self, key: CaseKey) -> None:
        """Note another version of the framework than the key names; a container or an environment has its own."""
        wanted, cluster = key.framework_version, self.run.cluster
        is_elsewhere = cluster.container is not None or cluster.environment_python(key.framework) is not None
        if wanted is None or not self.run.launcher.is_localhost or is_elsewhere:
            return
        versions = map(installed_version, load_framework(key.framework).distributions)
        found = next(filter(None, versions), None)
        if found is None or is_version(found, wanted):
            return
        what = f"names version {wanted} of {key.framework}, but {found} is installed"
        if not self.run.options.open:
            hint = "install that version, leave it out of the key, or declare the run open (--open)"
            self.missing.append(Problem(self.run.where, str(key), what, hint))
            return
        self.warnings.append(f"{key}: {what}")

    def _check_engine(self, key: CaseKey, name: str | None) -> None:
        """Reject an unknown engine if the ranks use this Python environment; another one may have it."""
        known = known_engines(self.run.vendor_folder)
        if name is None or name in known:
            return
        vendors = catalog.folders("vendors").values()
        owners = [each.name for each in vendors if name in catalog.engine_files(each.path / "engines")]
        close = f"it is an engine of {', '.join(owners)}: --vendor {owners[0]}" if owners else nearest(name, known)
        if self.run.launcher.is_localhost and self.run.cluster.container is None:
            raise SpecError([Problem(self.run.where, "compiler", f"unknown engine {name!r}", close)])
        self.warnings.append(f"{key}: no engine {name!r} is known here ({close}): the hosts must have it")

    def _chip(self, key: CaseKey) -> Chip | None:
        """Return the detected chip if the key names it, else the only chip of that name, else None."""
        vendor, detected, hardware = self.run.vendor, self.run.detected, key.hardware.lower()
        if self.run.is_detected_vendor:
            own = detected.chip
            if hardware == detected.hardware.lower() or (own is not None and hardware in own.key_names):
                return own
        named = [chip for chip in vendor.chips if hardware in chip.key_names]
        chip = named[0] if len(named) == 1 else None
        if self.run.is_here:
            found = detected.hardware if detected.is_present else f"no device of {vendor.name}"
            what = f"names {key.hardware}, but this machine has {found}"
            if detected.is_present and not self.run.options.open:
                other = f", or choose --vendor {' or '.join(detected.others)}" if detected.others else ""
                self.missing.append(Problem(self.run.where, str(key), what, f"write {detected.hardware}{other}"))
                return chip
            audited = ": the result will not be VALID" if detected.is_present else ""
            self.warnings.append(f"{key}: {what}{audited}")
        if not named:
            self.warnings.append(f"{key}: {vendor.name} describes no chip {key.hardware}; MFU will be null")
        return chip

    def _scale_problems(self, key: CaseKey, written: str) -> Iterator[Problem]:
        cluster, where = self.run.cluster, self.run.where
        if key.nnodes > len(cluster.hosts):
            what = f"requests {key.nnodes} hosts, the cluster {cluster.name!r} has {len(cluster.hosts)}"
            write = "'accelmark init HOST...' writes a run file and a cluster file for several hosts"
            add = write if self.run.launcher.is_localhost else "add hosts to the cluster file"
            yield Problem(where, written, what, f"{add}; or lower the fourth part of the key")
        used = cluster.hosts[: key.nnodes]
        without = [host.name for host in used if not host.service_ports]
        if without and len(without) < len(used):
            what = f"{', '.join(without)} has no service_ports, but other hosts of the job have"
            yield Problem(where, written, what, "give every host at least one, or none any")

    def _check_devices(self, key: CaseKey, written: str) -> None:
        """Note that this host has fewer devices than the key requests."""
        devices = self.run.detected.num_devices if self.run.is_here else None
        if devices is not None and key.nproc > devices:
            what = f"requests {key.nproc} devices a host, this one has {devices}"
            self.missing.append(Problem(self.run.where, written, what, "lower the fifth part of the key"))

    def _check_repeated(self, written: str, directory: str) -> None:
        if directory in self.planned:
            what = f"is requested twice (also as {self.planned[directory]!r})"
            raise SpecError([Problem(self.run.where, written, what, "raise its repeat instead")])
        self.planned[directory] = written


def _needs(asked: KeyRequest, planned: PlannedWork, framework: str) -> Iterator[Need]:
    """Yield the packages that case, framework and work need."""
    declared = {f"case {asked.key.model}": asked.case.requires_for(framework)}
    device = catalog.framework_device(asked.run.vendor, framework)
    declared[f"framework {framework}"] = (*load_framework(framework).requires, *device.requires)
    sdks: dict[str, str] = {}
    if engine := engine_specs(asked.run.vendor_folder).get(planned.engine or ""):
        declared[f"engine {planned.engine}"], sdks = engine.requires, engine.sdks
    for needed_by, requirements in (declared | dict(planned.requires)).items():
        yield from (Need(requirement=one, needed_by=needed_by, sdk=sdks.get(one, "")) for one in requirements)


def _first_round(asked: KeyRequest, planned: PlannedWork, chip: Chip | None) -> JobSpec:
    run, adaptation, key = asked.run, asked.adaptation, asked.key
    extern = catalog.FolderRef(name=adaptation.name, path=adaptation, sha256=tree_hash(adaptation))
    work = planned.work
    framework = work.trainer.framework if isinstance(work, ExternalJob) else key.framework
    device = catalog.framework_device(run.vendor, framework)
    return JobSpec(
        work=work,
        key=key,
        ranks_per_host=1 if work.is_single_process else load_framework(framework).ranks_per_host(key.nproc),
        round=1,
        case=asked.folder.ref(),
        case_version=asked.case.version,
        vendor=run.vendor.name,
        device_type=device.device_type,
        framework_module=device.module,
        vendor_environment=run.vendor.environment,
        collective_backend=device.collective_backend,
        extern=extern if (adaptation / "extern").is_dir() else None,
        adaptation=adaptation_files(adaptation),
        ceilings=run.detected.ceilings if run.is_detected_vendor else None,
        chip=chip,
        data_dirs=dict(planned.data_dirs),
        checkpoint_dir=Path("checkpoints"),
        open=run.options.open,
        provenance=dict(planned.provenance),
    )


def _installed_for_ranks(asked: KeyRequest) -> tuple[str, ...]:
    """Return the packages of the ``requirements.txt`` of the adaptation, else of the case."""
    file = requirements_file(asked.adaptation, asked.folder.path)
    return tuple(requirement_names(file)) if file is not None else ()
