"""Preflight: check all hosts of a run at the same time, before anything is started."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from pydantic import ValidationError

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.host import Host, HostError
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import command
from accelmark.run.preflight.facts import (
    DeviceFacts,
    HostFacts,
    HostProblem,
    cluster_problems,
    device_problems,
    host_problems,
    requirement_problems,
)
from accelmark.run.preflight.host_checks import check_images, devices_command, has_devices, pulled_images, read_devices
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import HostSpec
from accelmark.spec.plugins.requirements import Need, distributions

NEEDED_MODULES: Final = ("psutil", "pydantic", "yaml")
"""Packages that the node agent imports."""
REACH_TIMEOUT_S: Final = 4.0


@final
class Preflight:
    """Checks the hosts that jobs of a run are about to be started on.

    Args:
        directory: the run.
        launcher: how its hosts are reached.
        jobs: what is to be started on them.
        given_data: data directories given by the user, which have to be on every host.
    """

    def __init__(
        self,
        directory: RunDirectory,
        launcher: Launcher,
        jobs: Sequence[PlannedJob],
        given_data: Sequence[Path] = (),
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        self._jobs = jobs
        self._given_data = given_data
        self._cluster = directory.plan.cluster
        self._facts: dict[str, HostFacts] = {}
        self._devices: dict[str, tuple[DeviceFacts, ...]] = {}

    async def run(self) -> list[HostProblem]:
        """Return every problem of every host, in the order of the hosts.

        Raises:
            RunError: there is no allocation of hosts.
        """
        await self._launcher.allocate()
        used = {node.host for job in self._jobs for node in job.nodes}
        hosts = {host.name: self._launcher.host(host) for host in self._cluster.hosts if host.name in used}
        per_host = await asyncio.gather(*map(self._check, hosts.values()))
        problems = [problem for found in per_host for problem in found]
        facts = {name: self._facts[name] for name in hosts if name in self._facts}
        devices = {name: self._devices[name] for name in hosts if self._devices.get(name)}
        problems += cluster_problems(
            facts, devices, self._cluster, one_host_per_machine=self._launcher.spec.one_host_per_machine
        )
        problems += await self._reach(hosts)
        order = list(hosts)
        return sorted(dict.fromkeys(problems), key=lambda problem: order.index(problem.host))

    async def _check(self, host: Host) -> list[HostProblem]:
        name, launcher = host.name, self._launcher
        try:
            await host.connect()  # so that the clocks below are read without its delay
            begun = time.time()
            done = await host.run(command(launcher.python, "probe"), json.dumps(self._request(host)).encode() + b"\n")
            ended = time.time()
            if done.code != 0:
                return [HostProblem(name, f"cannot be checked with {launcher.python}: {done.message}")]
            facts = HostFacts.model_validate_json(done.out)
            self._facts[name] = facts
            # the probe read its clock at some time in between: only an offset beyond that interval counts
            offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
            problems = host_problems(name, facts, self._cluster, offset, launcher.work_directory, launcher.visible_file)
            installed = [package for job in self._jobs_on(host) for package in job.installs]
            problems += requirement_problems(name, facts, self._needs(host), installed)
            if self._cluster.container is not None and facts.engine_problem is None:
                problems += await check_images(host, self._directory.plan, self._jobs_on(host))
            if all(problem.severity == "warning" for problem in problems):
                problems += await self._check_devices(host, facts)
            return problems
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        except ValidationError as error:
            return [HostProblem(name, f"the probe printed something else: {error.errors()[0]['msg']}")]

    def _request(self, host: Host) -> dict[str, object]:
        container, launcher = self._cluster.container, self._launcher
        files = (container.image_file if container is not None else None, launcher.visible_file)
        return {
            "work_directory": launcher.work_directory,
            "lock": launcher.lock_file(host.spec),
            "ports": self._ports(host.spec),
            "directories": [str(path) for path in self._given_data],
            "files": [str(file) for file in files if file is not None],
            "modules": list(NEEDED_MODULES),
            "distributions": distributions(self._needs(host)),
            "engine": container.engine if container is not None else None,
        }

    def _needs(self, host: Host) -> list[Need]:
        """Return the requirements of the host's jobs on its own Python; a container's is not checked."""
        if self._cluster.container is not None:
            return []
        return [need for job in self._jobs_on(host) for need in job.requires]

    def _ports(self, host: HostSpec) -> list[int]:
        is_master = any(len(job.nodes) > 1 and job.nodes[0].host == host.name for job in self._jobs)
        return sorted({*([self._cluster.master_port] if is_master else []), *host.service_ports})

    def _jobs_on(self, host: Host) -> list[PlannedJob]:
        return [job for job in self._jobs if any(node.host == host.name for node in job.nodes)]

    async def _check_devices(self, host: Host, facts: HostFacts) -> list[HostProblem]:
        jobs = self._jobs_on(host)
        looked = await read_devices(host, self._directory, self._launcher, jobs[0], facts)
        if looked is None:
            return []
        if isinstance(looked, HostProblem):
            return [looked]
        self._devices[host.name] = looked
        needed = max(node.nproc for job in jobs for node in job.nodes if node.host == host.name)
        return device_problems(host.name, looked, self._directory.plan.vendor, needed)

    async def _reach(self, places: dict[str, Host]) -> list[HostProblem]:
        """Check that the other hosts of each job reach its master port."""
        groups = dict.fromkeys(tuple(node.host for node in job.nodes) for job in self._jobs if len(job.nodes) > 1)
        members: dict[str, list[str]] = {}
        for master, *others in groups:
            members.setdefault(master, []).extend(other for other in others if other in self._facts)
        found: list[HostProblem] = []
        for master, others in members.items():
            facts = self._facts.get(master)
            if facts is not None and self._cluster.master_port not in facts.busy_ports:
                found += await self._reach_master(places[master], [places[name] for name in dict.fromkeys(others)])
        return found

    async def _reach_master(self, master: Host, others: Sequence[Host]) -> list[HostProblem]:
        port, token, name = str(self._cluster.master_port), secrets.token_hex(8), master.name
        try:
            async with master.running(command(self._launcher.python, "port", "listen", port, token)) as line:
                answer = json.loads(line or b"{}")
                if not answer.get("ok"):
                    return [HostProblem(name, f"cannot listen on port {port}: {answer.get('why', 'no answer')}")]
                tries = (self._try(other, master, port, token) for other in others)
                return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [HostProblem(name, f"port {port} could not be checked: {error}")]
        except HostError as error:
            return [HostProblem(error.host, error.what)]

    async def _try(self, other: Host, master: Host, port: str, token: str) -> HostProblem | None:
        address = self._launcher.master_address(master.spec)
        argv = command(self._launcher.python, "port", "reach", address, port, token, f"{REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer = json.loads(done.out or b"{}")
        except HostError as error:
            return HostProblem(error.host, error.what)
        except ValueError:
            answer = {"why": done.message}
        if answer.get("ok"):
            return None
        what = f"cannot reach {master.name} at {address} port {port}: {answer.get('why', 'no answer')}"
        return HostProblem(other.name, what, "open the port in the firewall, or set master_port")


def preflight_commands(plan: Plan, launcher: Launcher, jobs: Sequence[PlannedJob]) -> dict[str, list[list[str]]]:
    """Return the commands that check each host of ``jobs``; ``TOKEN`` is random each time."""
    hosts = {spec.name: launcher.host(spec) for spec in plan.cluster.hosts}
    python, port = launcher.python, str(plan.cluster.master_port)
    found: dict[str, list[list[str]]] = {}
    for name in dict.fromkeys(node.host for job in jobs for node in job.nodes):
        found[name] = [command(python, "probe")]
        for recipe in pulled_images(plan, [job for job in jobs if any(node.host == name for node in job.nodes)]):
            found[name] += [recipe.present, recipe.look_up]
        if has_devices(plan.vendor):
            found[name].append(devices_command(launcher.variables, python, plan.vendor))
    masters = {
        name: [other.host for job in jobs if job.nodes[0].host == name for other in job.nodes[1:]] for name in hosts
    }
    for master, others in masters.items():
        if not others:
            continue
        found[master].append(command(python, "port", "listen", port, "TOKEN"))
        address = launcher.master_address(hosts[master].spec)
        for other in dict.fromkeys(others):
            found[other].append(command(python, "port", "reach", address, port, "TOKEN", f"{REACH_TIMEOUT_S:g}"))
    return {name: [hosts[name].command(argv) for argv in commands] for name, commands in found.items()}
