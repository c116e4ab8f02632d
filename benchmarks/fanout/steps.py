"""The steps that are timed: check a host, deliver a job, start a no-op, wait for its end, copy its files back.

``together`` does them as AccelMark does: one connection a host, all hosts at the same time. ``one_by_one`` does what
FlagPerf's scripts do: every check and every copy a command of openssh's client, one host after another.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.ssh.connection import SshConnection, put_files
from accelmark.run.launchers.ssh.launcher import LOGINS_AT_ONCE, POLLS_PER_S, NodeStream, raise_descriptor_limit
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.onhost import command, start_command
from accelmark.run.preflight.checks import HostFacts, HostState, problems_of_host
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.plugins.launcher import options_of
from tests.cluster.bed import WORK

REQUEST = {
    "work_directory": str(WORK),
    "mounted": None,
    "is_locked": False,
    "locked_file": None,
    "ports": [29501],
    "urls": [],
    "directories": ["/usr"],
    "files": [],
    "modules": ["json"],
    "distributions": [],
    "engine": None,
}
NOOP = ["sh", "-c", "echo nothing to do"]
PING_S = 5.0
NUM_OPENSSH_COMMANDS = 12


@final
class Phases:
    """Wall and processor time of this process in each phase, in seconds."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a phase."""
        wall, cpu = time.monotonic(), time.process_time()
        yield
        self.figures[name] = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}


async def together(cluster: ClusterSpec, home: Path, mark: str) -> Phases:
    """All hosts at the same time, one phase after another; fails where any step does."""
    phases = Phases()
    async with _connections(cluster) as hosts:
        with phases.timed("preflight"):
            launcher = create_launcher(plan_of_hosts(cluster), home)
            await asyncio.gather(*(_check(host, launcher) for host in hosts))
        with phases.timed("launch"):
            await asyncio.gather(*(_launch(host, cluster.python, mark) for host in hosts))
        with phases.timed("collection"):
            await asyncio.gather(*(_collect(host, cluster.python, home / host.name, mark) for host in hosts))
    return phases


@asynccontextmanager
async def _connections(cluster: ClusterSpec) -> AsyncIterator[list[SshConnection]]:
    raise_descriptor_limit(len(cluster.hosts))
    dialling = asyncio.Semaphore(LOGINS_AT_ONCE)
    hosts = [SshConnection(host, options_of(Options, cluster), dialling) for host in cluster.hosts]
    try:
        yield hosts
    finally:
        await asyncio.gather(*(host.close() for host in hosts))


async def _check(host: SshConnection, launcher: Launcher) -> None:
    done = await host.run(command(launcher.python, "probe"), json.dumps(REQUEST).encode() + b"\n", timeout_s=300)
    facts = HostFacts.model_validate_json(done.out)
    problems = problems_of_host(HostState(host.name, facts, launcher))
    assert not [problem for problem in problems if problem.severity == "error"], problems


def _node(host: SshConnection, mark: str) -> PurePosixPath:
    return PurePosixPath(WORK) / "runs" / mark / host.name


async def _launch(host: SshConnection, python: str, mark: str) -> None:
    node = _node(host, mark)
    await put_files(host, python, {node / "agent.json": '{"job": "none"}'})
    started = await host.run(start_command(str(node), NOOP), timeout_s=300)
    assert started.code == 0, started


async def _collect(host: SshConnection, python: str, home: Path, mark: str) -> None:
    await NodeStream(host, python, str(_node(host, mark)), "fan-out", home, PING_S).follow()
    assert (home / "agent.log").read_text() == "nothing to do\n"


async def steadily(cluster: ClusterSpec, home: Path, remote: str) -> Phases:
    """Follow a job on all hosts at the same time, to its end; connections are open before."""
    phases = Phases()
    async with _connections(cluster) as hosts:
        poll_s = len(hosts) / POLLS_PER_S
        streams = [
            NodeStream(host, cluster.python, remote, "fan-out", home / host.name, PING_S, poll_s) for host in hosts
        ]
        await asyncio.gather(*(host.connect() for host in hosts))
        with phases.timed("steady"):
            await asyncio.gather(*(stream.follow() for stream in streams))
    return phases


def one_by_one(cluster: ClusterSpec, home: Path, mark: str, num_hosts: int) -> None:
    """One host after another through openssh, the first ``num_hosts``; each check is a command of its own."""
    for host in cluster.hosts[:num_hosts]:
        _sequence(cluster, host, home / host.name, mark)


def _sequence(cluster: ClusterSpec, host: HostSpec, home: Path, mark: str) -> None:
    ssh_options = options_of(Options, cluster)
    target = f"{ssh_options.user}@{host.address}"
    options = ["-o", f"UserKnownHostsFile={ssh_options.known_hosts}", "-o", "BatchMode=yes", "-i", str(ssh_options.key)]
    node = f"{WORK}/runs/{mark}/{host.name}"
    checks = [":", "date +%s", f"df -m {WORK}", "free -m", f"{cluster.python} --version", "test -d /usr"]
    checks.append("cat /proc/net/tcp")
    home.mkdir(parents=True)

    def ssh(line: str) -> str:
        argv = ["ssh", *options, target, line]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def scp(source: str, target: str) -> None:
        subprocess.run(["scp", "-q", *options, source, target], check=True, capture_output=True)

    for check in checks:
        ssh(check)
    ssh(f"mkdir -p {node}")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write('{"job": "none"}')
        file.flush()
        scp(file.name, f"{target}:{node}/agent.json")
    ssh(f"cd {node} && nohup sh -c 'echo nothing to do' >agent.log 2>&1 & echo $!")
    ssh(f"test -s {node}/agent.log || sleep 0.2")
    scp(f"{target}:{node}/agent.log", str(home / "agent.log"))
    assert (home / "agent.log").read_text() == "nothing to do\n"
