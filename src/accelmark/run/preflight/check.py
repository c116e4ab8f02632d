"""Preflight: check all hosts of a run at the same time, before anything is started."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from pydantic import TypeAdapter, ValidationError

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.store.loaded_run import HOLDER_FILE, is_in_progress
from accelmark.run.controller.node_jobs import node_jobs
from accelmark.run.host import Host, HostError, UnreachableError
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import command
from accelmark.run.preflight.facts import (
    AGENT_PACKAGES,
    DeviceFacts,
    HostFacts,
    HostProblem,
    chip_problems,
    cluster_problems,
    device_problems,
    host_problems,
)
from accelmark.run.preflight.packages import (
    RANK_NEEDS,
    create_command,
    known_device,
    package_facts,
    package_problems,
    python_path,
)
from accelmark.run.record.directory import RunDirectory
from accelmark.run.sandboxes.image import ImageRecipe, availability, named_image, recipe_of
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec, HostSpec
from accelmark.spec.job import ServeJob
from accelmark.spec.plugins.catalog import load_framework, load_vendor
from accelmark.spec.plugins.requirements import Need, distributions

REACH_TIMEOUT_S: Final = 4.0
_DEVICES_MODULE: Final = "accelmark.run.preflight.devices"
_DEVICES: Final = TypeAdapter(tuple[DeviceFacts, ...])
_CONTAINER_TIMEOUT_S: Final = 120.0
_REGISTRY_TIMEOUT_S: Final = 60.0
_NOT_ASKED: Final = "its registry could not be asked"


@final
@dataclass
class Preflight:
    """Checks the hosts that jobs of a run are about to be started on; without jobs, all hosts of the cluster."""

    directory: RunDirectory
    launcher: Launcher
    jobs: Sequence[PlannedJob]
    given_data: Sequence[Path] = ()
    """Data directories given by the user, which have to be on every host."""
    _facts: dict[str, HostFacts] = field(default_factory=dict, init=False)
    _devices: dict[str, tuple[DeviceFacts, ...]] = field(default_factory=dict, init=False)

    @property
    def _cluster(self) -> ClusterSpec:
        return self.directory.plan.cluster

    async def run(self) -> list[HostProblem]:
        """Return every problem of every host, in the order of the hosts.

        Raises:
            RunError: there is no allocation of hosts.
        """
        await self.launcher.allocate()
        used = {node.host for job in self.jobs for node in job.nodes} or {host.name for host in self._cluster.hosts}
        hosts = {host.name: self.launcher.host(host) for host in self._cluster.hosts if host.name in used}
        per_host = await asyncio.gather(*map(self._check, hosts.values()))
        problems = [problem for found in per_host for problem in found]
        facts = {name: self._facts[name] for name in hosts if name in self._facts}
        devices = {name: self._devices[name] for name in hosts if self._devices.get(name)}
        problems += cluster_problems(
            facts, devices, self._cluster, one_host_per_machine=self.launcher.spec.one_host_per_machine
        )
        problems += await self._reach(hosts)
        order = list(hosts)
        return sorted(dict.fromkeys(problems), key=lambda problem: order.index(problem.host))

    async def _check(self, host: Host) -> list[HostProblem]:
        name, launcher = host.name, self.launcher
        try:
            await host.connect()  # so that the clocks below are read without its delay
            begun = time.time()
            done = await host.run(command(launcher.python, "probe"), json.dumps(self._request(host)).encode() + b"\n")
            ended = time.time()
            if done.code != 0:
                what = f"cannot be checked with {launcher.python}: {done.message}"
                return [
                    HostProblem(name, what, "set python in the cluster file to a Python 3.11 or newer of that host")
                ]
            facts = HostFacts.model_validate_json(done.out)
            self._facts[name] = facts
            # the probe read its clock at some time in between: only an offset beyond that interval counts
            offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
            sets_threads = bool(self.jobs) and all(job.job.work.threads is not None for job in self.jobs)
            problems = host_problems(
                name,
                facts,
                self._cluster,
                offset,
                launcher.work_directory,
                launcher.visible_file,
                sets_threads=sets_threads,
            )
            problems += await self.check_packages(host)
            if self._cluster.container is not None and facts.engine_problem is None:
                problems += await self._check_images(host)
            if all(problem.severity == "warning" for problem in problems):
                problems += await self._check_devices(host, facts)
            return problems
        except HostError as error:
            return [HostProblem(error.host, error.problem, error.advice)]
        except ValidationError as error:
            what = f"the probe printed something else: {error.errors()[0]['msg']}"
            return [HostProblem(name, what, "remove what the login shell prints there (profile files, banners)")]

    def _request(self, host: Host) -> dict[str, object]:
        container, launcher = self._cluster.container, self.launcher
        files = (container.image_file if container is not None else None, launcher.visible_file)
        return {
            "work_directory": launcher.work_directory,
            "mounted": None if launcher.shared_directory is None else str(launcher.shared_directory),
            "is_locked": launcher.locks_hosts,
            "locked_file": self._locked_file(),
            "ports": self._ports(host.spec),
            "urls": endpoints(self._jobs_on(host)),
            "directories": [str(path) for path in self.given_data],
            "files": [str(file) for file in files if file is not None],
            "modules": list(AGENT_PACKAGES),
            # Agents and ranks on this machine inherit it; the probe runs isolated from its environment.
            "python_path": python_path() if launcher.spec.is_localhost else [],
            "engine": CONTAINER_ENGINES[container.engine].check if container is not None else None,
        }

    def _locked_file(self) -> str | None:
        """Return a file that this coordinator has locked and the hosts must see locked; None: nothing is shared."""
        is_shared = self.launcher.visible_file is not None and is_in_progress(self.directory.path)
        return str(self.directory.path / HOLDER_FILE) if is_shared else None

    async def check_packages(self, host: Host, *, imports: bool = True) -> list[HostProblem]:
        """Return what the Pythons that run the host's ranks lack; a container's is not checked.

        ``imports``: also whether installed modules that are often broken can be imported.
        """
        if self._cluster.container is not None:
            return []
        found: list[HostProblem] = []
        is_here = self.launcher.spec.is_localhost
        environments: Iterable[str] = () if self.jobs else self._cluster.environments
        for framework, (asked, installs) in _packages(self._jobs_on(host), environments).items():
            spec, environment = load_framework(framework), self._cluster.environments.get(framework)
            needs = [*(RANK_NEEDS if environment is not None else ()), *asked]
            try:
                facts = await package_facts(
                    host,
                    self.launcher.python_of(framework),
                    distributions(needs),
                    spec.checked_imports if imports else (),
                    python_path() if is_here else (),
                )
            except UnreachableError:
                raise
            except HostError as error:
                create = create_command(framework, environment, is_here=is_here)
                repair = create if environment is not None else error.advice
                found.append(HostProblem(host.name, error.problem, repair))
                continue
            device = known_device(self.directory.plan.vendor, framework)
            found += package_problems(
                host.name, facts, needs, installs, spec, environment, device=device, is_here=is_here
            )
        return found

    def _ports(self, host: HostSpec) -> list[int]:
        ports = [self._cluster.master_port] if host.name in self._masters() else []
        return sorted({*ports, *host.service_ports})

    def _masters(self) -> dict[str, list[str]]:
        """Return the hosts that others have to reach; without jobs the first one, as for a job on all hosts."""
        first, *others = (host.name for host in self._cluster.hosts)
        return _masters(self.jobs) if self.jobs else {first: others} if others else {}

    def _jobs_on(self, host: Host) -> list[PlannedJob]:
        return [job for job in self.jobs if any(node.host == host.name for node in job.nodes)]

    async def _check_devices(self, host: Host, facts: HostFacts) -> list[HostProblem]:
        """Return what is wrong with the vendor's devices on a host, or why they cannot be read.

        Where the host's Python cannot run AccelMark, they are read in the first job's image; it is a warning if that
        is still to be built.
        """
        launcher, plan, name, jobs = self.launcher, self.directory.plan, host.name, self._jobs_on(host)
        if not _has_devices(plan.vendor):
            return []
        if not facts.lacking_modules:
            await launcher.deliver(host.spec)
            done = await host.run(launcher.native_command(_DEVICES_MODULE, plan.vendor))
        else:
            if not jobs:
                return []
            recipe = recipe_of(plan, jobs[0].job)
            if recipe is None or (await host.run(recipe.present)).code != 0:
                what = f"devices of {plan.vendor} cannot be read before the image is there"
                packages = ", ".join(facts.lacking_packages)
                hint = f"nothing, the run obtains it; or install {packages} for {facts.executable}"
                return [HostProblem(name, what, hint, "warning")]
            await launcher.deliver(host.spec)
            nodes = await node_jobs(self.directory, jobs[0], launcher)
            node = next(node for node in nodes if node.host.name == name)
            done = await host.run(
                launcher.sandbox_command(node, _DEVICES_MODULE, plan.vendor), timeout_s=_CONTAINER_TIMEOUT_S
            )
        try:
            if done.code == 0:
                self._devices[name] = devices = _DEVICES.validate_json(done.out)
                needed = max((node.nproc for job in jobs for node in job.nodes if node.host == name), default=1)
                found = device_problems(name, devices, plan.vendor, needed)
                return found + ([] if plan.open else chip_problems(name, devices[:needed], jobs))
        except ValidationError:
            pass
        what = f"devices of {plan.vendor} cannot be read: {done.message}"
        return [HostProblem(name, what, f"correct that, then repeat there: accelmark check vendor {plan.vendor} --run")]

    async def _check_images(self, host: Host) -> list[HostProblem]:
        """Return a problem for each image that is neither on a host nor in its registry.

        Where it is not known whether a pull would fail, the problem is a warning.
        """
        found: list[HostProblem] = []
        for recipe in _pulled_images(self.directory.plan, self._jobs_on(host)):
            if (await host.run(recipe.present)).code == 0:
                continue
            absent = f"the image {recipe.name} is absent, and"
            do = "correct container.image, log in to its registry there, or provide it as a file (image_file)"
            hint = f"{do}, until this works there: {recipe.command}"
            try:
                done = await host.run(recipe.look_up, timeout_s=_REGISTRY_TIMEOUT_S)
            except UnreachableError:
                raise
            except HostError as error:
                found.append(HostProblem(host.name, f"{absent} {_NOT_ASKED}: {error.what}", hint, "warning"))
                continue
            answer = availability(done.code, done.message)
            if answer == "absent":
                what = f"{absent} was not found in its registry: {done.message}"
                found.append(HostProblem(host.name, what, hint))
            elif answer == "unknown":
                found.append(HostProblem(host.name, f"{absent} {_NOT_ASKED}: {done.message}", hint, "warning"))
        return found

    async def _reach(self, hosts: dict[str, Host]) -> list[HostProblem]:
        """Check that the other hosts of each job reach its master port."""
        found: list[HostProblem] = []
        for master, others in self._masters().items():
            facts = self._facts.get(master)
            if facts is not None and self._cluster.master_port not in facts.busy_ports:
                there = [hosts[name] for name in others if name in self._facts]
                found += await self._reach_master(hosts[master], there)
        return found

    async def _reach_master(self, master: Host, others: Sequence[Host]) -> list[HostProblem]:
        port, token, name = str(self._cluster.master_port), secrets.token_hex(8), master.name
        try:
            async with master.running(command(self.launcher.python, "port", "listen", port, token)) as line:
                answer = json.loads(line or b"{}")
                if not answer.get("ok"):
                    what = f"cannot listen on port {port}: {answer.get('why', 'no answer')}"
                    return [HostProblem(name, what, "set master_port in the cluster file to a free port")]
                address = await self.launcher.master_address(master.spec)
                tries = (self._try(other, name, address, port, token) for other in others)
                return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [
                HostProblem(name, f"port {port} could not be checked: {error}", "set master_port in the cluster file")
            ]
        except HostError as error:
            return [HostProblem(error.host, error.problem, error.advice)]

    async def _try(self, other: Host, master: str, address: str, port: str, token: str) -> HostProblem | None:
        argv = command(self.launcher.python, "port", "reach", address, port, token, f"{REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer = json.loads(done.out or b"{}")
        except HostError as error:
            return HostProblem(error.host, error.problem, error.advice)
        except ValueError:
            answer = {"why": done.message}
        if answer.get("ok"):
            return None
        what = f"cannot reach {master} at {address} port {port}: {answer.get('why', 'no answer')}"
        return HostProblem(other.name, what, "open the port in the firewall, or set master_port")


def _packages(jobs: Sequence[PlannedJob], frameworks: Iterable[str] = ()) -> dict[str, tuple[list[Need], list[str]]]:
    """Return, for each framework of ``jobs``, what they need and what is installed for their ranks.

    Of ``frameworks``, which have no job, it is what they need themselves.
    """
    found: dict[str, tuple[list[Need], list[str]]] = {
        name: ([Need(requirement=one, needed_by=f"framework {name}") for one in load_framework(name).requires], [])
        for name in frameworks
    }
    for job in jobs:
        needs, installs = found.setdefault(job.job.framework, ([], []))
        needs += job.requires
        installs += job.installs
    return found


def endpoints(jobs: Iterable[PlannedJob]) -> list[str]:
    """Return the URLs of the running servers that jobs measure."""
    works = (planned.job.work for planned in jobs)
    urls = (work.settings.endpoint for work in works if isinstance(work, ServeJob))
    return list(dict.fromkeys(url for url in urls if url is not None))


def _masters(jobs: Sequence[PlannedJob]) -> dict[str, list[str]]:
    """Return, for the first host of each job on several hosts, the others, which have to reach it."""
    found: dict[str, list[str]] = {}
    for master, *others in ([node.host for node in job.nodes] for job in jobs if len(job.nodes) > 1):
        found[master] = list(dict.fromkeys([*found.get(master, []), *others]))
    return found


def _has_devices(vendor: str) -> bool:
    """Return whether a vendor's devices can be checked; CPUs are always present and in use."""
    detect = load_vendor(vendor).telemetry.get("detect") or {}
    return bool(detect) and not (isinstance(detect, dict) and detect.get("always"))


def _pulled_images(plan: Plan, jobs: Sequence[PlannedJob]) -> list[ImageRecipe]:
    """Return each image of ``jobs``, without jobs that of the cluster, that is pulled where it is absent."""
    recipes = [recipe_of(plan, job.job) for job in jobs]
    if not jobs and plan.cluster.container is not None:
        recipes = [named_image(plan.cluster.container)]
    return list({recipe.name: recipe for recipe in recipes if recipe is not None and recipe.look_up}.values())


async def preflight_commands(plan: Plan, launcher: Launcher, jobs: Sequence[PlannedJob]) -> dict[str, list[list[str]]]:
    """Return the commands that check each host of ``jobs``; ``TOKEN`` is random each time."""
    hosts = {spec.name: launcher.host(spec) for spec in plan.cluster.hosts}
    python, port = launcher.python, str(plan.cluster.master_port)
    found: dict[str, list[list[str]]] = {}
    for name in dict.fromkeys(node.host for job in jobs for node in job.nodes):
        here = [job for job in jobs if any(node.host == name for node in job.nodes)]
        found[name] = [command(python, "probe")]
        if plan.cluster.container is None:
            found[name] += [command(launcher.python_of(framework), "packages") for framework in _packages(here)]
        for recipe in _pulled_images(plan, here):
            found[name] += [recipe.present, recipe.look_up]
        if _has_devices(plan.vendor):
            found[name].append(launcher.native_command(_DEVICES_MODULE, plan.vendor))
    for master, others in _masters(jobs).items():
        found[master].append(command(python, "port", "listen", port, "TOKEN"))
        address = await launcher.master_address(hosts[master].spec)
        for other in others:
            found[other].append(command(python, "port", "reach", address, port, "TOKEN", f"{REACH_TIMEOUT_S:g}"))
    return {name: [hosts[name].command(argv) for argv in commands] for name, commands in found.items()}
