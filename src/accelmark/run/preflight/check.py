"""The look itself: all hosts at the same time, each problem beside the others."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from pydantic import ValidationError

from accelmark.plan.plan import PlannedJob
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.place import Place
from accelmark.run.launchers.ssh.connection import HostError
from accelmark.run.onhost import command
from accelmark.run.preflight.facts import (
    DeviceFacts,
    HostFacts,
    HostProblem,
    judge_devices,
    judge_host,
    judge_together,
)
from accelmark.run.preflight.images import look_for_images
from accelmark.run.preflight.look import look_at_devices
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import HostSpec

NEEDED_MODULES: Final = ("psutil", "pydantic", "yaml")
"""What the node agent imports beyond AccelMark and the standard library."""
REACH_TIMEOUT_S: Final = 4.0
_LISTEN_TIMEOUT_S: Final = 20.0


@final
class Preflight:
    """Looks at the hosts that jobs of a run are about to be started on.

    Args:
        directory: the run.
        launcher: how its hosts are reached.
        jobs: what is to be started on them.
        given_data: data directories that a person named, which have to be on every host already.
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
            RunError: the hosts cannot be had at all (Slurm gives no allocation).
        """
        used = {node.host for job in self._jobs for node in job.nodes}
        places = await self._launcher.places([host for host in self._cluster.hosts if host.name in used])
        per_host = await asyncio.gather(*(self._look(place) for place in places))
        problems = [problem for found in per_host for problem in found]
        names = [place.host.name for place in places]
        facts = {name: self._facts[name] for name in names if name in self._facts}
        devices = {name: self._devices[name] for name in names if self._devices.get(name)}
        problems += judge_together(facts, devices, self._cluster)
        problems += await self._reach({place.host.name: place for place in places})
        order = {name: place for place, name in enumerate(names)}
        return sorted(dict.fromkeys(problems), key=lambda problem: order.get(problem.host, len(order)))

    async def _look(self, place: Place) -> list[HostProblem]:
        name = place.host.name
        try:
            await place.reach()  # so that the clocks below are read without its delay
            begun = time.time()
            done = await place.run(command(place.python, "probe"), json.dumps(self._request(place)).encode() + b"\n")
            ended = time.time()
            if done.code != 0:
                return [HostProblem(name, f"cannot be looked at with {place.python}: {done.said}")]
            facts = HostFacts.model_validate_json(done.out)
            self._facts[name] = facts
            # the probe tells its time at some moment in between: an offset counts only beyond that
            offset = max(0.0, facts.time - ended) + min(0.0, facts.time - begun)
            problems = judge_host(name, facts, self._cluster, offset, place.work)
            if place.shown is not None and str(place.shown) in facts.missing_files:
                unseen = f"the file {place.shown} is missing"
                what = f"does not see {place.shown.parent} of this machine"
                hint = "put the run directory on a file system that all nodes see (--out)"
                problems = [p if p.what != unseen else HostProblem(name, what, hint) for p in problems]
            if self._cluster.container is not None and facts.engine_problem is None:
                problems += await look_for_images(place, self._directory.plan, self._jobs_on(place))
            if all(problem.severity == "warning" for problem in problems):
                problems += await self._look_at_devices(place, facts)
            return problems
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        except ValidationError as error:
            return [HostProblem(name, f"answers with something else than facts: {error.errors()[0]['msg']}")]

    def _request(self, place: Place) -> dict[str, object]:
        container = self._cluster.container
        files = [str(container.image_file)] if container is not None and container.image_file is not None else []
        return {
            "work_directory": place.work,
            "lock": place.lock,
            "ports": self._ports(place.host),
            "directories": [str(path) for path in self._given_data],
            "files": files + ([str(place.shown)] if place.shown is not None else []),
            "modules": list(NEEDED_MODULES),
            "engine": container.engine if container is not None else None,
        }

    def _ports(self, host: HostSpec) -> list[int]:
        is_master = any(len(job.nodes) > 1 and job.nodes[0].host == host.name for job in self._jobs)
        return sorted({*([self._cluster.master_port] if is_master else []), *host.service_ports})

    def _jobs_on(self, place: Place) -> list[PlannedJob]:
        return [job for job in self._jobs if any(node.host == place.host.name for node in job.nodes)]

    async def _look_at_devices(self, place: Place, facts: HostFacts) -> list[HostProblem]:
        jobs = self._jobs_on(place)
        looked = await look_at_devices(place, self._directory, self._launcher, jobs[0], facts)
        if looked is None:
            return []
        if isinstance(looked, HostProblem):
            return [looked]
        self._devices[place.host.name] = looked
        needed = max(node.nproc for job in jobs for node in job.nodes if node.host == place.host.name)
        return judge_devices(place.host.name, looked, self._directory.plan.vendor, needed)

    async def _reach(self, places: dict[str, Place]) -> list[HostProblem]:
        """Try the master port between hosts that run one job together."""
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

    async def _reach_master(self, master: Place, others: Sequence[Place]) -> list[HostProblem]:
        port, token, name = str(self._cluster.master_port), secrets.token_hex(8), master.host.name
        try:
            listener = await master.open(command(master.python, "port", "listen", port, token))
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        try:
            answer = json.loads(await asyncio.wait_for(listener.readline(), _LISTEN_TIMEOUT_S) or b"{}")
            if not answer.get("ok"):
                return [HostProblem(name, f"port {port} cannot be listened at: {answer.get('why', 'no answer')}")]
            tries = (self._try(other, master, port, token) for other in others)
            return [problem for problem in await asyncio.gather(*tries) if problem is not None]
        except (TimeoutError, OSError, ValueError) as error:
            return [HostProblem(name, f"port {port} could not be tried: {error}")]
        except HostError as error:
            return [HostProblem(error.host, error.what)]
        finally:
            await listener.close()

    async def _try(self, other: Place, master: Place, port: str, token: str) -> HostProblem | None:
        argv = command(other.python, "port", "reach", master.address, port, token, f"{REACH_TIMEOUT_S:g}")
        try:
            done = await other.run(argv)
            answer = json.loads(done.out or b"{}")
        except HostError as error:
            return HostProblem(error.host, error.what)
        except ValueError:
            answer = {"why": done.said}
        if answer.get("ok"):
            return None
        what = f"does not reach {master.host.name} at {master.address} port {port}: {answer.get('why', 'no answer')}"
        return HostProblem(other.host.name, what, "open the port in the firewall, or set master_port")
