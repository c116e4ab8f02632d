"""Preflight: check all hosts of a run at the same time, before anything is started."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.store.loaded_run import HOLDER_FILE, is_in_progress
from accelmark.run.controller.execution import node_jobs
from accelmark.run.display.displays import RunObserver
from accelmark.run.host import Host, HostError, UnreachableError, python_path
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import command
from accelmark.run.preflight import checks
from accelmark.run.record.directory import RunDirectory
from accelmark.run.sandboxes.sandbox import ImageRecipe, named_image, recipe_of
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import Problem
from accelmark.spec.job import ServeJob
from accelmark.spec.number_format import counted
from accelmark.spec.plugins.catalog import load_framework, load_vendor
from accelmark.spec.plugins.requirements import Need, base_requirements, distributions, page_needs

_LISTEN_TIMEOUT_S: Final = 20.0
REACH_TIMEOUT_S: Final = 4.0
_PROGRAM_MODULE: Final = "accelmark.run.onhost.program"
_DEVICES_MODULE: Final = "accelmark.run.preflight.devices"
_DEVICES: Final = TypeAdapter(tuple[checks.DeviceFacts, ...])
_CONTAINER_TIMEOUT_S: Final = 120.0
_REGISTRY_TIMEOUT_S: Final = 60.0


async def run_preflight(launcher: Launcher, jobs: Sequence[PlannedJob], observer: RunObserver) -> None:
    """Check every host that ``jobs`` are about to be started on, and report warnings to the observer.

    Raises HostsNotReadyError: with every problem of every host; warnings count where the run is strict.
    """
    observer.checking(f"checking {counted(len({node.host for job in jobs for node in job.nodes}), 'host')}")
    problems = [*checks.missing_packages(page_needs()), *await Preflight(launcher, jobs).run()]
    observer.checking("")
    require_ready(problems, launcher.plan)
    for problem in checks.grouped(problems):
        observer.note(f"warning: {problem}")


async def check_cluster(cluster: ClusterSpec, report: Callable[[str], None] = lambda _: None) -> list[Problem]:
    """Check all hosts of a cluster, and its spares, as for a job on all of them; needs no run.

    ``report`` receives the reason for a launcher's wait. Raises RunError: there is no allocation of hosts.
    """
    everything = cluster.model_copy(update={"hosts": (*cluster.hosts, *cluster.spares), "spares": ()})
    with tempfile.TemporaryDirectory(prefix="accelmark-preflight-") as place:
        directory = RunDirectory.create(Path(place) / "run", plan_of_hosts(everything))
        async with create_launcher(directory.plan, directory.path) as launcher:
            launcher.report = report
            return await Preflight(launcher, ()).run()


async def missing_here(launcher: Launcher) -> list[Problem]:
    """Return why the run would not start as far as this machine shows; hosts are checked where they are this machine.

    Nothing is written, downloaded or started; warnings are left out unless the run is strict.
    """
    plan, is_here = launcher.plan, launcher.spec.is_localhost
    programs = [argv[0] for argv in launcher.allocation_commands() if shutil.which(argv[0]) is None]
    hint = "run it on a machine of the cluster"
    problems = [Problem(checks.HERE, "", f"{name} is not on the PATH", hint) for name in programs]
    needs = [Need(requirement=text, needed_by=f"launcher {launcher.spec.name}") for text in launcher.spec.requires]
    problems += checks.missing_packages([*needs, *page_needs()])
    if is_here:
        problems_of_hosts = await Preflight(launcher, plan.jobs, is_dry_run=True).run()
        problems += (problem for problem in problems_of_hosts if problem.severity == "error" or plan.strict)
    return problems


def require_ready(problems: Sequence[Problem], plan: Plan) -> None:
    """Raise HostsNotReadyError with every problem where one is an error; warnings count where the run is strict."""
    if any(problem.severity == "error" or plan.strict for problem in problems):
        raise checks.HostsNotReadyError(problems, strict=plan.strict)


@dataclass
class Preflight:
    """Checks the hosts that jobs of a run are about to be started on; without jobs, all hosts of the cluster."""

    launcher: Launcher
    jobs: Sequence[PlannedJob]
    is_dry_run: bool = False
    """Whether nothing will be started: imports, registries and images are left out."""
    _states: dict[str, checks.HostState] = field(default_factory=dict, init=False)

    @property
    def _cluster(self) -> ClusterSpec:
        return self.launcher.plan.cluster

    async def run(self) -> list[Problem]:
        """Return every problem of every host, in the order of the hosts."""
        if not self.is_dry_run:
            await self.launcher.allocate()
        used = {node.host for job in self.jobs for node in job.nodes} or {host.name for host in self._cluster.hosts}
        hosts = {host.name: self.launcher.host(host) for host in self._cluster.hosts if host.name in used}
        per_host = await asyncio.gather(*map(self._check, hosts.values()))
        problems = [problem for of_host in per_host for problem in of_host]
        states = [self._states[name] for name in hosts if name in self._states]
        problems += checks.problems_between(states)
        for master, others in _masters(self.launcher.plan, self.jobs).items():
            state = self._states.get(master)
            if state is not None and self._cluster.master_port not in state.facts.busy_ports:
                there = [hosts[name] for name in others if name in self._states]
                problems += await self._reach_master(hosts[master], there)
        order = list(hosts)
        return sorted(dict.fromkeys(problems), key=lambda problem: order.index(problem.where))

    async def _check(self, host: Host) -> list[Problem]:
        name, launcher = host.name, self.launcher
        try:
            await host.connect()  # so that the clocks below are read without its delay
            begun = time.time()
            done = await host.run(command(launcher.python, "probe"), json.dumps(self._request(host)).encode() + b"\n")
            ended = time.time()
            if done.code != 0:
                hint = "correct that there, or set python in the cluster file to a Python 3.9 or newer of that host"
                return [Problem(name, "", f"cannot be checked with {launcher.python}: {done.message}", hint)]
            facts = checks.HostFacts.model_validate_json(done.out)
        except HostError as error:
            return [_failed(error)]
        except ValidationError as error:
            what = f"the probe printed something else: {error.errors()[0]['msg']}"
            return [Problem(name, "", what, "remove what the login shell prints there (profile files, banners)")]
        # The probe read its clock at some time in between: only an offset beyond that interval counts.
        offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
        self._states[name] = state = checks.HostState(name, facts, launcher, self._jobs_on(host), offset)
        try:
            problems = await self._read_packages(host, state)
            if self._cluster.container is not None and facts.engine_problem is None and not self.is_dry_run:
                problems += await self._check_images(host)
            problems += await asyncio.to_thread(checks.problems_of_host, state)
            if not any(problem.severity == "error" for problem in problems):
                problems += await self._read_devices(host, state)
                problems += await asyncio.to_thread(checks.problems_of_host, state)
        except HostError as error:
            return [_failed(error)]
        return problems

    def _request(self, host: Host) -> dict[str, object]:
        container, launcher = self._cluster.container, self.launcher
        files = (container.image_file if container is not None else None, launcher.visible_file)
        # A file that this coordinator has locked, which hosts that share it must see locked.
        is_shared = launcher.visible_file is not None and is_in_progress(launcher.run)
        is_master = host.name in _masters(self.launcher.plan, self.jobs)
        ports = {*host.spec.service_ports, *([self._cluster.master_port] if is_master else [])}
        data = dict.fromkeys(path for _, path in checks.given_data(self.launcher.plan)) if self.jobs else ()
        works = (planned.job.work for planned in self._jobs_on(host))
        urls = dict.fromkeys(work.settings.endpoint for work in works if isinstance(work, ServeJob))
        return {
            "work_directory": launcher.work_directory,
            "mounted": None if launcher.shared_directory is None else str(launcher.shared_directory),
            "is_locked": launcher.locks_hosts,
            "locked_file": str(launcher.run / HOLDER_FILE) if is_shared else None,
            "ports": sorted(ports),
            "urls": [url for url in urls if url is not None],
            "directories": list(map(str, data)),
            "files": [str(file) for file in files if file is not None],
            "modules": list(checks.AGENT_PACKAGES),
            # Agents and ranks on this machine inherit it; the probe runs isolated from its environment.
            "python_path": python_path() if launcher.spec.is_localhost else [],
            "engine": CONTAINER_ENGINES[container.engine].check if container is not None else None,
        }

    def _jobs_on(self, host: Host) -> list[PlannedJob]:
        return [job for job in self.jobs if any(node.host == host.name for node in job.nodes)]

    async def _read_packages(self, host: Host, state: checks.HostState) -> list[Problem]:
        """Read the packages of the Pythons that run the host's ranks; returns why some cannot be read.

        Those of an image that is still to be obtained are not read, and none where the container engine does not work.
        """
        is_contained, problems = self._cluster.container is not None, []
        if is_contained and state.facts.engine_problem is not None:
            return []
        for framework, (needs, _) in checks.packages_of(state.jobs, self._cluster.environments).items():
            environment = self._cluster.environments.get(framework) if not is_contained else None
            wanted = distributions([*(checks.RANK_NEEDS if environment or is_contained else ()), *needs])
            spec = load_framework(framework)
            own = [Need(requirement=item, needed_by="") for item in (*base_requirements(), *spec.requires)]
            # Of cases, engines and servers, also the packages are tried: their own requirements may be lacking.
            tried = sorted({*distributions(needs)} - {*distributions([*own, *checks.RANK_NEEDS])})
            modules = () if self.is_dry_run else spec.checked_imports
            imports = [] if self.is_dry_run else tried
            path = python_path() if state.is_localhost and not is_contained else ()
            enter, python = None, ""
            try:
                if is_contained:
                    job = next((job for job in state.jobs if job.job.framework == framework), None)
                    image = await self._image_of(host, job)
                    if job is None or image is None:
                        continue
                    inside = await self._inside(host, job)
                    enter, python = partial(inside, _PROGRAM_MODULE, "packages"), f"the image {image.name}"
                    state.images[framework] = image.name
                else:
                    python = self.launcher.python_of(framework)
                facts = await checks.package_facts(host, python, wanted, modules, path, imports, enter)
                state.packages[framework] = facts
            except UnreachableError:
                raise
            except HostError as error:
                create = checks.create_command(framework, environment, is_here=state.is_localhost)
                hint = create if environment is not None else error.advice
                problems.append(Problem(host.name, "", error.problem, hint))
        return problems

    async def _image_of(self, host: Host, job: PlannedJob | None) -> ImageRecipe | None:
        """Return the image of a job; None where the host does not have it yet, or nothing may be started."""
        recipe = None if job is None or self.is_dry_run else recipe_of(self.launcher.plan, job.job)
        return recipe if recipe is not None and (await host.run(recipe.present)).code == 0 else None

    async def _inside(self, host: Host, job: PlannedJob) -> Callable[..., list[str]]:
        """Deliver AccelMark, and return what makes a module and its arguments a command in a job's sandbox."""
        await self.launcher.deliver(host.spec)
        nodes = await node_jobs(job, self.launcher)
        return self.launcher.agents([node for node in nodes if node.host.name == host.name])[0].sandbox_command

    async def _read_devices(self, host: Host, state: checks.HostState) -> list[Problem]:
        """Read the vendor's devices on a host; returns why they cannot be read.

        Where the host's Python cannot run AccelMark, they are read in the first job's image; it is a warning if that
        is still to be built.
        """
        launcher, plan, name, facts = self.launcher, self.launcher.plan, host.name, state.facts
        if not _has_devices(plan.vendor) or (facts.lacking_modules and (not state.jobs or self.is_dry_run)):
            return []
        if not facts.lacking_modules:
            await launcher.deliver(host.spec)
            done = await host.run(launcher.native_command(_DEVICES_MODULE, plan.vendor))
        else:
            if await self._image_of(host, state.jobs[0]) is None:
                what = f"devices of {plan.vendor} cannot be read before the image is there"
                hint = f"nothing, the run obtains it; or install {facts.lacking_packages} for {facts.executable}"
                return [Problem(name, "", what, hint, "warning")]
            inside = await self._inside(host, state.jobs[0])
            done = await host.run(inside(_DEVICES_MODULE, plan.vendor), timeout_s=_CONTAINER_TIMEOUT_S)
        with suppress(ValidationError):
            if done.code == 0:
                state.devices = _DEVICES.validate_json(done.out)
                return []
        hint = f"correct that, then repeat there: accelmark check vendor {plan.vendor} --run"
        return [Problem(name, "", f"devices of {plan.vendor} cannot be read: {done.message}", hint)]

    async def _check_images(self, host: Host) -> list[Problem]:
        """Return a warning for each image that is absent on a host and not found in its registry.

        The engine's daemon, which pulls it, may use a mirror or a login that the look-up does not.
        """
        problems: list[Problem] = []
        for recipe in _pulled_images(self.launcher.plan, self._jobs_on(host)):
            if (await host.run(recipe.present)).code == 0:
                continue
            done = await host.run(recipe.look_up, timeout_s=_REGISTRY_TIMEOUT_S)
            if done.code != 0:
                what = f"the image {recipe.name} is absent, and was not found in its registry: {done.message}"
                hint = f"correct container.image, or log in to its registry, until this works there: {recipe.command}"
                problems.append(Problem(host.name, "", what, hint, "warning"))
        return problems

    async def _reach_master(self, master: Host, others: Sequence[Host]) -> list[Problem]:
        port, token, hint = str(self._cluster.master_port), secrets.token_hex(8), "set master_port in the cluster file"
        try:
            listen = command(self.launcher.python, "listen", port, token)
            async with master.running(listen, b"", _LISTEN_TIMEOUT_S) as line:
                answer = json.loads(line or b"{}")
                if not answer.get("ok"):
                    what = f"cannot listen on port {port}: {answer.get('why', 'no answer')}"
                    return [Problem(master.name, "", what, f"{hint} to a free port")]
                address = await self.launcher.master_address(master.spec)
                tries = (self._try(other, master.name, address, port, token) for other in others)
                return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [Problem(master.name, "", f"port {port} could not be checked: {error}", hint)]
        except HostError as error:
            return [_failed(error)]

    async def _try(self, other: Host, master: str, address: str, port: str, token: str) -> Problem | None:
        argv = command(self.launcher.python, "reach", address, port, token, f"{REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer: dict[str, Any] = json.loads(done.out or b"{}")
        except HostError as error:
            return _failed(error)
        except ValueError:
            answer = {"why": done.message}
        if answer.get("ok"):
            return None
        what = f"cannot reach {master} at {address} port {port}: {answer.get('why', 'no answer')}"
        return Problem(other.name, "", what, "open the port in the firewall, or set master_port")


def _failed(error: HostError) -> Problem:
    return Problem(error.host, "", error.problem, error.advice)


def _masters(plan: Plan, jobs: Sequence[PlannedJob]) -> dict[str, list[str]]:
    """Return, for the first host of each job, the others, which have to reach it; without jobs, for the cluster's."""
    reached_by: dict[str, list[str]] = {}
    groups = [[node.host for node in job.nodes] for job in jobs] or [[host.name for host in plan.cluster.hosts]]
    for master, *others in groups:
        if others:
            reached_by[master] = list(dict.fromkeys([*reached_by.get(master, []), *others]))
    return reached_by


def _has_devices(vendor: str) -> bool:
    """Return whether a vendor's devices can be checked; CPUs are always present and in use."""
    detect = load_vendor(vendor).telemetry.get("detect") or {}
    return bool(detect) and not (isinstance(detect, dict) and detect.get("always"))


def _pulled_images(plan: Plan, jobs: Sequence[PlannedJob]) -> list[ImageRecipe]:
    """Return the images of ``jobs`` (without jobs, the cluster's image) that are pulled where they are absent."""
    recipes = [recipe_of(plan, job.job) for job in jobs]
    if not jobs and plan.cluster.container is not None:
        recipes = [named_image(plan.cluster.container)]
    return list({recipe.name: recipe for recipe in recipes if recipe is not None and recipe.look_up}.values())


async def preflight_commands(plan: Plan, launcher: Launcher) -> dict[str, list[list[str]]]:
    """Return the commands that check each host before a run; ``TOKEN`` is random each time."""
    hosts = {spec.name: launcher.host(spec) for spec in plan.cluster.hosts}
    python, port = launcher.python, str(plan.cluster.master_port)
    commands_of: dict[str, list[list[str]]] = {}
    for name in dict.fromkeys(node.host for job in plan.jobs for node in job.nodes):
        here = [job for job in plan.jobs if any(node.host == name for node in job.nodes)]
        commands_of[name] = [command(python, "probe")]
        if plan.cluster.container is None:
            pythons = map(launcher.python_of, checks.packages_of(here))
            commands_of[name] += [command(ranks_python, "packages") for ranks_python in pythons]
        for recipe in _pulled_images(plan, here):
            commands_of[name] += [recipe.present, [*recipe.look_up]]
        if _has_devices(plan.vendor):
            commands_of[name].append(launcher.native_command(_DEVICES_MODULE, plan.vendor))
    for master, others in _masters(plan, plan.jobs).items():
        commands_of[master].append(command(python, "listen", port, "TOKEN"))
        address = await launcher.master_address(hosts[master].spec)
        for other in others:
            commands_of[other].append(command(python, "reach", address, port, "TOKEN", f"{REACH_TIMEOUT_S:g}"))
    return {name: [hosts[name].command(argv) for argv in commands] for name, commands in commands_of.items()}
