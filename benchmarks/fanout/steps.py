"""The steps that are timed: check a host, deliver a job, start a no-op, wait for its end, copy its files back.

``together`` does them as AccelMark does: one connection a host, all hosts at the same time. ``one_by_one`` does what
FlagPerf's scripts do: every check and every copy a command of openssh's client, one host after another.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.delivery import put_files
from accelmark.run.launchers.ssh.launcher import LOGINS_AT_ONCE, POLLS_PER_S, raise_descriptor_limit
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.launchers.ssh.stream import NodeStream
from accelmark.run.onhost import command, start_command
from accelmark.run.preflight.facts import HostFacts, host_problems
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.plugins.launcher import options_of
from tests.cluster.bed import WORK

REQUEST = {
    "work_directory": str(WORK),
    "is_locked": False,
    "locked_file": None,
    "ports": [29501],
    "directories": ["/usr"],
    "files": [],
    "modules": ["json"],
    "distributions": [],
    "engine": None,
}
NOOP = ["sh", "-c", "echo nothing to do"]
PING_S = 5.0
NUM_OPENSSH_COMMANDS = 12


async def together(cluster: ClusterSpec, home: Path, mark: str) -> None:
    """All hosts at the same time; fails where any step does."""
    raise_descriptor_limit(len(cluster.hosts))
    dialling = asyncio.Semaphore(LOGINS_AT_ONCE)
    hosts = [SshConnection(host, options_of(Options, cluster), dialling) for host in cluster.hosts]
    try:
        await asyncio.gather(*(_one(host, cluster, home / host.name, mark) for host in hosts))
    finally:
        await asyncio.gather(*(host.close() for host in hosts))


async def _one(host: SshConnection, cluster: ClusterSpec, home: Path, mark: str) -> None:
    python = cluster.python
    done = await host.run(command(python, "probe"), json.dumps(REQUEST).encode() + b"\n", timeout_s=300)
    facts = HostFacts.model_validate_json(done.out)
    problems = host_problems(host.name, facts, cluster, 0.0, str(WORK))
    assert not [problem for problem in problems if problem.severity == "error"], problems
    node = PurePosixPath(WORK) / "runs" / mark / host.name
    await put_files(host, python, {node / "agent.json": '{"job": "none"}'})
    started = await host.run(start_command(str(node), NOOP), timeout_s=300)
    assert started.code == 0, started
    await NodeStream(host, python, str(node), home, PING_S).follow()
    assert (home / "agent.log").read_text() == "nothing to do\n"


async def steadily(cluster: ClusterSpec, home: Path, remote: str) -> None:
    """Follow a job on all hosts at the same time, to its end."""
    raise_descriptor_limit(len(cluster.hosts))
    dialling = asyncio.Semaphore(LOGINS_AT_ONCE)
    hosts = [SshConnection(host, options_of(Options, cluster), dialling) for host in cluster.hosts]
    poll_s = len(hosts) / POLLS_PER_S
    streams = [NodeStream(host, cluster.python, remote, home / host.name, PING_S, poll_s) for host in hosts]
    try:
        await asyncio.gather(*(stream.follow() for stream in streams))
    finally:
        await asyncio.gather(*(host.close() for host in hosts))


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
