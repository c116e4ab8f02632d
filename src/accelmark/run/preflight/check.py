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
from accelmark.run.launchers.host import HostError, PreflightHost
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
_LISTEN_TIMEOUT_S: Final = 20.0


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
        used = {node.host for job in self._jobs for node in job.nodes}
        hosts = await self._launcher.hosts([host for host in self._cluster.hosts if host.name in used])
        per_host = await asyncio.gather(*(self._check(host) for host in hosts))
        problems = [problem for found in per_host for problem in found]
        names = [host.spec.name for host in hosts]
        facts = {name: self._facts[name] for name in names if name in self._facts}
        devices = {name: self._devices[name] for name in names if self._devices.get(name)}
        problems += cluster_problems(
            facts, devices, self._cluster, one_host_per_machine=self._launcher.spec.one_host_per_machine
        )
        problems += await self._reach({host.spec.name: host for host in hosts})
        order = {name: place for place, name in enumerate(names)}
        return sorted(dict.fromkeys(problems), key=lambda problem: order.get(problem.host, len(order)))

    async def _check(self, host: PreflightHost) -> list[HostProblem]:
        name = host.spec.name
        try:
            await host.connect()  # so that the clocks below are read without its delay
            begun = time.time()
            done = await host.run(command(host.python, "probe"), json.dumps(self._request(host)).encode() + b"\n")
            ended = time.time()
            if done.code != 0:
                return [HostProblem(name, f"cannot be checked with {host.python}: {done.message}")]
            facts = HostFacts.model_validate_json(done.out)
            self._facts[name] = facts
            # the probe read its clock at some time in between: only an offset beyond that interval counts
            offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
            problems = host_problems(name, facts, self._cluster, offset, host.work_directory, host.visible_file)
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

    def _request(self, host: PreflightHost) -> dict[str, object]:
        container = self._cluster.container
        files = [str(container.image_file)] if container is not None and container.image_file is not None else []
        return {
            "work_directory": host.work_directory,
            "lock": host.lock_file,
            "ports": self._ports(host.spec),
            "directories": [str(path) for path in self._given_data],
            "files": files + ([str(host.visible_file)] if host.visible_file is not None else []),
            "modules": list(NEEDED_MODULES),
            "distributions": distributions(self._needs(host)),
            "engine": container.engine if container is not None else None,
        }

    def _needs(self, host: PreflightHost) -> list[Need]:
        """Return the requirements of the host's jobs on its own Python; a container's is not checked."""
        if self._cluster.container is not None:
            return []
        return [need for job in self._jobs_on(host) for need in job.requires]

    def _ports(self, host: HostSpec) -> list[int]:
        is_master = any(len(job.nodes) > 1 and job.nodes[0].host == host.name for job in self._jobs)
        return sorted({*([self._cluster.master_port] if is_master else []), *host.service_ports})

    def _jobs_on(self, host: PreflightHost) -> list[PlannedJob]:
        return [job for job in self._jobs if any(node.host == host.spec.name for node in job.nodes)]

    async def _check_devices(self, host: PreflightHost, facts: HostFacts) -> list[HostProblem]:
        jobs = self._jobs_on(host)
        looked = await read_devices(host, self._directory, self._launcher, jobs[0], facts)
        if looked is None:
            return []
        if isinstance(looked, HostProblem):
            return [looked]
        self._devices[host.spec.name] = looked
        needed = max(node.nproc for job in jobs for node in job.nodes if node.host == host.spec.name)
        return device_problems(host.spec.name, looked, self._directory.plan.vendor, needed)

    async def _reach(self, places: dict[str, PreflightHost]) -> list[HostProblem]:
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

    async def _reach_master(self, master: PreflightHost, others: Sequence[PreflightHost]) -> list[HostProblem]:
        port, token, name = str(self._cluster.master_port), secrets.token_hex(8), master.spec.name
        try:
            listener = await master.open(command(master.python, "port", "listen", port, token))
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        try:
            answer = json.loads(await asyncio.wait_for(listener.readline(), _LISTEN_TIMEOUT_S) or b"{}")
            if not answer.get("ok"):
                return [HostProblem(name, f"cannot listen on port {port}: {answer.get('why', 'no answer')}")]
            tries = (self._try(other, master, port, token) for other in others)
            return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [HostProblem(name, f"port {port} could not be checked: {error}")]
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        finally:
            await listener.close()

    async def _try(self, other: PreflightHost, master: PreflightHost, port: str, token: str) -> HostProblem | None:
        argv = command(other.python, "port", "reach", master.address, port, token, f"{REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer = json.loads(done.out or b"{}")
        except HostError as error:
            return HostProblem(error.host, error.what)
        except ValueError:
            answer = {"why": done.message}
        if answer.get("ok"):
            return None
        what = f"cannot reach {master.spec.name} at {master.address} port {port}: {answer.get('why', 'no answer')}"
        return HostProblem(other.spec.name, what, "open the port in the firewall, or set master_port")


def preflight_commands(plan: Plan, launcher: Launcher, jobs: Sequence[PlannedJob]) -> dict[str, list[list[str]]]:
    """Return the commands that check each host of ``jobs``; ``TOKEN`` is random each time."""
    hosts = {host.name: host for host in plan.cluster.hosts}
    python, port = launcher.python, str(plan.cluster.master_port)
    used = dict.fromkeys(node.host for job in jobs for node in job.nodes)
    found: dict[str, list[list[str]]] = {}
    for name in used:
        found[name] = [launcher.host_command(hosts[name], command(python, "probe"))]
        for recipe in pulled_images(plan, [job for job in jobs if any(node.host == name for node in job.nodes)]):
            found[name] += [launcher.host_command(hosts[name], argv) for argv in (recipe.present, recipe.look_up)]
        if has_devices(plan.vendor):
            found[name].append(
                launcher.host_command(hosts[name], devices_command(launcher.variables, python, plan.vendor))
            )
    reached: set[tuple[str, str]] = set()
    for job in jobs:
        master, *others = [node.host for node in job.nodes]
        for other in others:
            if (master, other) in reached:
                continue
            if not any(known == master for known, _ in reached):
                found[master].append(
                    launcher.host_command(hosts[master], command(python, "port", "listen", port, "TOKEN"))
                )
            reached.add((master, other))
            timeout, address = f"{REACH_TIMEOUT_S:g}", launcher.master_address(hosts[master])
            argv = command(python, "port", "reach", address, port, "TOKEN", timeout)
            found[other].append(launcher.host_command(hosts[other], argv))
    return found
