"""The look itself: all hosts at the same time, each problem beside the others."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from pydantic import TypeAdapter, ValidationError

from accelmark.plan.plan import Plan
from accelmark.run.delivery import wheel
from accelmark.run.onhost import command
from accelmark.run.preflight.facts import (
    DeviceFacts,
    HostFacts,
    HostProblem,
    judge_devices,
    judge_host,
    judge_together,
)
from accelmark.run.ssh.connection import HostError, SshHost
from accelmark.run.ssh.deliver import deliver
from accelmark.run.ssh.layout import Layout
from accelmark.spec.catalog import PLUGINS_VARIABLE, load_vendor
from accelmark.spec.cluster import HostSpec

NEEDED_MODULES: Final = ("psutil", "pydantic", "yaml")
"""What the node agent imports beyond AccelMark and the standard library."""
_REACH_TIMEOUT_S: Final = 4.0
_DEVICES: Final = TypeAdapter(tuple[DeviceFacts, ...])


@final
class Preflight:
    """Looks at the hosts of a plan that are reached over SSH.

    Args:
        plan: what is to run on them.
        given_data: data directories that a person named, which have to be on every host already.
    """

    def __init__(self, plan: Plan, given_data: Sequence[Path] = ()) -> None:
        self._plan = plan
        self._given_data = given_data
        self._layout = Layout.of(plan, Path("preflight"))
        used = {node.host for job in plan.jobs for node in job.nodes}
        self._hosts = [SshHost(host, plan.cluster) for host in plan.cluster.hosts if host.name in used]
        self._facts: dict[str, HostFacts] = {}
        self._devices: dict[str, tuple[DeviceFacts, ...]] = {}

    async def run(self) -> list[HostProblem]:
        """Return every problem of every host, in the order of the hosts."""
        try:
            per_host = await asyncio.gather(*(self._look(host) for host in self._hosts))
            problems = [problem for found in per_host for problem in found]
            names = [host.name for host in self._hosts]
            facts = {name: self._facts[name] for name in names if name in self._facts}
            devices = {name: self._devices[name] for name in names if self._devices.get(name)}
            problems += judge_together(facts, devices, self._plan.cluster)
            problems += await self._reach()
        finally:
            await asyncio.gather(*(host.close() for host in self._hosts))
        order = {host.name: place for place, host in enumerate(self._hosts)}
        return sorted(dict.fromkeys(problems), key=lambda problem: order.get(problem.host, len(order)))

    async def _look(self, host: SshHost) -> list[HostProblem]:
        cluster = self._plan.cluster
        try:
            await host.connect()
            begun = time.time()
            done = await host.run(
                command(cluster.python, "probe"), json.dumps(self._request(host.host)).encode() + b"\n"
            )
            ended = time.time()
            if done.code != 0:
                return [HostProblem(host.name, f"cannot be looked at with {cluster.python}: {done.said}")]
            facts = HostFacts.model_validate_json(done.out)
            self._facts[host.name] = facts
            # the probe tells its time at some moment in between: an offset counts only beyond that
            offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
            problems = judge_host(host.name, facts, cluster, offset)
            if not problems or all(problem.severity == "warning" for problem in problems):
                problems += await self._look_at_devices(host)
            return problems
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        except ValidationError as error:
            return [HostProblem(host.name, f"answers with something else than facts: {error.errors()[0]['msg']}")]

    def _request(self, host: HostSpec) -> dict[str, object]:
        cluster, container = self._plan.cluster, self._plan.cluster.container
        is_distributed = any(len(job.nodes) > 1 and job.nodes[0].host == host.name for job in self._plan.jobs)
        files = [str(container.image_file)] if container is not None and container.image_file is not None else []
        return {
            "work_directory": str(self._layout.work),
            "lock": str(self._layout.lock(host)),
            "ports": sorted({*([cluster.master_port] if is_distributed else []), *host.service_ports}),
            "directories": [str(path) for path in self._given_data],
            "files": files,
            "modules": [] if container is not None else list(NEEDED_MODULES),
            "engine": container.engine if container is not None else None,
        }

    async def _look_at_devices(self, host: SshHost) -> list[HostProblem]:
        plan, vendor = self._plan, load_vendor(self._plan.vendor)
        detect = vendor.telemetry.get("detect") or {}
        if (isinstance(detect, dict) and detect.get("always")) or not detect or plan.cluster.container is not None:
            return []
        layout = self._layout
        await deliver(host, plan.cluster.python, wheel(), layout.code)
        plugins = f"{PLUGINS_VARIABLE}={layout.code / 'plugins'}"
        argv = [
            "env",
            f"PYTHONPATH={layout.code}",
            plugins,
            plan.cluster.python,
            "-m",
            "accelmark.run.preflight.devices",
        ]
        done = await host.run([*argv, plan.vendor])
        if done.code != 0:
            return [HostProblem(host.name, f"devices of {plan.vendor} cannot be read: {done.said}")]
        devices = _DEVICES.validate_json(done.out)
        self._devices[host.name] = devices
        needed = max(node.nproc for job in plan.jobs for node in job.nodes if node.host == host.name)
        return judge_devices(host.name, devices, plan.vendor, needed)

    async def _reach(self) -> list[HostProblem]:
        """Try the master port between hosts that run one job together."""
        groups = dict.fromkeys(tuple(node.host for node in job.nodes) for job in self._plan.jobs if len(job.nodes) > 1)
        by_name = {host.name: host for host in self._hosts}
        members: dict[str, list[str]] = {}
        for master, *others in groups:
            members.setdefault(master, []).extend(other for other in others if other in self._facts)
        found: list[HostProblem] = []
        for master, others in members.items():
            facts = self._facts.get(master)
            if facts is not None and self._plan.cluster.master_port not in facts.busy_ports:
                found += await self._reach_master(by_name[master], [by_name[name] for name in dict.fromkeys(others)])
        return found

    async def _reach_master(self, master: SshHost, others: Sequence[SshHost]) -> list[HostProblem]:
        cluster = self._plan.cluster
        port, token, python = str(cluster.master_port), secrets.token_hex(8), cluster.python
        try:
            listener = await master.open(command(python, "port", "listen", port, token))
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        try:
            answer = json.loads(await asyncio.wait_for(listener.stdout.readline(), 20) or b"{}")
            if not answer.get("ok"):
                return [
                    HostProblem(master.name, f"port {port} cannot be listened at: {answer.get('why', 'no answer')}")
                ]
            tries = (self._try(other, master, port, token) for other in others)
            return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [HostProblem(master.name, f"port {port} could not be tried: {error}")]
        finally:
            listener.stdin.write_eof()
            listener.close()

    async def _try(self, other: SshHost, master: SshHost, port: str, token: str) -> HostProblem | None:
        address = master.host.address
        argv = command(self._plan.cluster.python, "port", "reach", address, port, token, f"{_REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer = json.loads(done.out or b"{}")
        except HostError as error:
            return HostProblem(error.host, error.what)
        except ValueError:
            answer = {"why": done.said}
        if answer.get("ok"):
            return None
        what = f"does not reach {master.name} at {address} port {port}: {answer.get('why', 'no answer')}"
        return HostProblem(other.name, what, "open the port in the firewall, or set master_port")
