"""Build the plan: all rounds of all keys, merged settings, and all checks that need no host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import accelmark
from accelmark.plan import request as planning
from accelmark.plan.inference import plan_inference, plan_serving
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.plan.request import DataDirs, Detected, KeyRequest, PlannedWork, RunRequest
from accelmark.plan.training import plan_training
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import Problem, RequestError, SpecError
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.plugins.catalog import (
    FolderRef,
    find,
    framework_device,
    load_case,
    load_framework,
    load_vendor,
    plugin_directories,
    tree_hash,
    unread_plugins,
)
from accelmark.spec.plugins.framework import module_command
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
    """Resolve ``request``, a run file's (``where``), and the dotted settings of ``command_line`` into a plan.

    ``allow_missing_data``: list missing data, devices and framework versions in the plan instead of raising.
    Raises SpecError with all problems of all keys, RequestError if no case can run on this vendor's chips.
    """
    launcher = load_launcher(cluster.launcher)
    vendor_name = request.vendor or cluster.vendor or (detected.vendor if launcher.is_localhost else None)
    if vendor_name is None:
        what = f"{where}: cluster {cluster.name!r} names no vendor, and devices of other machines are not detected"
        raise RequestError(f"{what}: add 'vendor: NAME' to the cluster file ({detected.vendor} is this machine's)")
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
    warnings = []
    if detected.others and run.is_here:
        others = ", ".join(detected.others)
        warnings.append(f"this machine also has devices of {others}; {vendor_name} is measured: choose with --vendor")
    if detected.problem is not None and run.is_here:
        what = "cannot be read, so that chip and telemetry are unknown"
        warnings.append(f"devices of {vendor_name} {what}: {detected.problem}")
    if cluster.container is not None and not CONTAINER_ENGINES[cluster.container.engine].is_tried:
        what = f"AccelMark was not run with {cluster.container.engine}; its commands follow its documentation"
        warnings.append(f"container.engine: {what}: look at them with --dry-run")
    planner = _Planner(run, problems=unusable_parts(cluster), warnings=[*warnings, *unread_plugins()])
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
        vendor_sha256=tree_hash(run.vendor_folder, whole=True),
        plugins=tuple(plugin_directories()),
        cluster=cluster,
        jobs=tuple(planner.jobs),
        missing_data=tuple(dict.fromkeys(planner.missing)),
        warnings=tuple(dict.fromkeys(planner.warnings)),
    )


@dataclass(slots=True)
class _Planner:
    """Plans keys one by one and collects their problems."""

    run: RunRequest
    problems: list[Problem]
    warnings: list[str]
    missing: list[Problem] = field(default_factory=list)
    """Missing data, devices and framework versions."""
    jobs: list[PlannedJob] = field(default_factory=list)
    planned: dict[str, str] = field(default_factory=dict)
    """Directory of a key's rounds -> the key as written."""

    def add(self, request: CaseRequest) -> None:
        """Plan all rounds of one key, or record its problems."""
        where = self.run.where
        try:
            key = CaseKey.parse(request.key, hardware=self.run.detected.hardware, where=where)
            self.problems.extend(self._scale_problems(key, request.key))
            if self.run.options.rules is not None and request.task != "train":
                what = f"the rules {self.run.options.rules.name} are of training"
                self.problems.append(Problem(where, request.key, what, "remove the task, or the rules"))
            self._plan(key, request)
        except SpecError as error:
            self.problems.extend(error.problems)
        except RequestError as error:
            self.problems.append(Problem(where, request.key, str(error).removeprefix(f"{where}: ")))

    def _plan(self, key: CaseKey, request: CaseRequest) -> None:
        chip, capabilities = self._chip(key), dict(self.run.detected.capabilities if self.run.is_here else {})
        if chip is not None:
            named = (*chip.capabilities, *(["fp8"] if chip.peaks.fp8 is not None else []))
            capabilities |= dict.fromkeys(named, f"vendor.yaml, chip {chip.name}")
        asked = KeyRequest(
            run=self.run,
            key=key,
            request=request,
            folder=find("cases", key.model, self.run.where),
            case=load_case(key.model),
            capabilities=capabilities,
            problems=self.problems,
            missing=self.missing,
        )
        num_problems = len(self.problems)
        planned = _PLANNERS[request.task](asked)
        if len(self.problems) > num_problems:
            return
        if planned.directory in self.planned:
            what = f"is requested twice (also as {self.planned[planned.directory]!r})"
            self.problems.append(Problem(self.run.where, request.key, what, "raise its repeat instead"))
        self.planned[planned.directory] = request.key
        self._check_version(key)
        self.warnings += [f"{key}: {warning}" for warning in planned.warnings]
        first = _first_job(asked, planned, chip)
        for number in range(1, key.repeat + 1):
            spec = first.job.model_copy(update={"round": number, "work": planned.work.for_round(number)})
            self.jobs.append(first.model_copy(update={"directory": f"{planned.directory}/round{number}", "job": spec}))

    def _check_version(self, key: CaseKey) -> None:
        """Compare the framework's version with the key's; a container or an environment has its own."""
        wanted, cluster = key.framework_version, self.run.cluster
        has_own = cluster.container is not None or cluster.environment_python(key.framework) is not None
        if wanted is None or not self.run.launcher.is_localhost or has_own:
            return
        version = next(filter(None, map(installed_version, load_framework(key.framework).distributions)), None)
        if version is None or is_version(version, wanted):
            return
        what = f"names version {wanted} of {key.framework}, but {version} is installed"
        if self.run.options.open:
            self.warnings.append(f"{key}: {what}")
        else:
            hint = "install that version, remove it from the key, or declare the run open (--open)"
            self.missing.append(Problem(self.run.where, str(key), what, hint))

    def _chip(self, key: CaseKey) -> Chip | None:
        """Return the detected chip if the key names it, else the only chip of that name, else None."""
        vendor, detected, hardware = self.run.vendor, self.run.detected, key.hardware.lower()
        if self.run.is_detected_vendor and (
            hardware == detected.hardware.lower() or (detected.chip is not None and hardware in detected.chip.key_names)
        ):
            return detected.chip
        named = [chip for chip in vendor.chips if hardware in chip.key_names]
        chip = named[0] if len(named) == 1 else None
        if self.run.is_here:
            present = detected.hardware if detected.is_present else f"no device of {vendor.name}"
            what = f"names {key.hardware}, but this machine has {present}"
            if detected.is_present and not self.run.options.open:
                other = f", or choose --vendor {' or '.join(detected.others)}" if detected.others else ""
                self.missing.append(Problem(self.run.where, str(key), what, f"write {detected.hardware}{other}"))
                return chip
            self.warnings.append(f"{key}: {what}" + (": the result will not be VALID" if detected.is_present else ""))
        if not named:
            self.warnings.append(f"{key}: {vendor.name} describes no chip {key.hardware}; MFU will be null")
        return chip

    def _scale_problems(self, key: CaseKey, written: str) -> Iterator[Problem]:
        cluster, where, devices = self.run.cluster, self.run.where, self.run.detected.num_devices
        if key.nnodes > len(cluster.hosts):
            what = f"requests {key.nnodes} hosts, the cluster {cluster.name!r} has {len(cluster.hosts)}"
            write = "'accelmark init HOST...' writes a run file and a cluster file for several hosts"
            add = write if self.run.launcher.is_localhost else "add hosts to the cluster file"
            yield Problem(where, written, what, f"{add}; or lower the fourth part of the key")
        used = cluster.hosts[: key.nnodes]
        without = [host.name for host in used if not host.service_ports]
        if without and len(without) < len(used):
            what = f"{', '.join(without)} has no service_ports, but other hosts of the job have"
            yield Problem(where, written, what, "give every host at least one, or give none")
        if self.run.is_here and devices is not None and key.nproc > devices:
            what = f"requests {key.nproc} devices a host, this one has {devices}"
            self.missing.append(Problem(where, written, what, "lower the fifth part of the key"))


def _first_job(asked: KeyRequest, planned: PlannedWork, chip: Chip | None) -> PlannedJob:
    """Return the first round of a key, without its directory."""
    run, adaptation, key, work = asked.run, asked.adaptation, asked.key, planned.work
    framework = work.trainer.framework if isinstance(work, ExternalJob) else key.framework
    spec, device = load_framework(framework), framework_device(run.vendor, framework)
    files, listed = planning.adaptation_files(adaptation), planning.requirements_file(adaptation, asked.folder.path)
    extern = FolderRef(name=adaptation.name, path=adaptation, sha256=files.sha256) if files is not None else None
    job = JobSpec(
        work=work,
        key=key,
        ranks_per_host=1 if work.is_single_process else spec.ranks_per_host(key.nproc),
        round=1,
        case=asked.folder.ref(work.task),
        case_version=asked.case.version,
        vendor=run.vendor.name,
        device_type=device.device_type,
        framework_module=device.module,
        vendor_environment=run.vendor.environment,
        collective_backend=device.collective_backend,
        extern=extern if (adaptation / "extern").is_dir() else None,
        adaptation=files,
        ceilings=run.detected.ceilings if run.is_detected_vendor else None,
        chip=chip,
        data_dirs=dict(planned.data_dirs),
        checkpoint_dir=Path("checkpoints"),
        open=run.options.open,
        rules=run.options.rules,
        provenance=dict(planned.provenance),
    )
    declared = {
        f"case {key.model}": asked.case.requires_for(framework),
        f"framework {framework}": (*spec.requires, *device.requires),
        **planned.requires,
    }
    command = tuple(module_command("python", work.rank_module, "job.json"))
    hosts = enumerate(run.cluster.hosts[: key.nnodes])
    return PlannedJob(
        directory="",
        job=job,
        requires=tuple(
            Need(requirement=requirement, needed_by=needed_by, sdk=planned.sdks.get(requirement, ""))
            for needed_by, requirements in declared.items()
            for requirement in requirements
        ),
        installs=tuple(requirement_names(listed)) if listed is not None else (),
        layer_files=planned.layer_files,
        nodes=tuple(PlannedNode(host=host.name, noderank=n, nproc=key.nproc, command=command) for n, host in hosts),
    )
