"""A real Slurm of four nodes on this machine: munged, slurmctld and a slurmd for each node, all in one directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

NUM_NODES: Final = 4
_CONF: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
{binding}
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MessageTimeout=5
ReturnToService=2
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] {each} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> int:
    for first in range(17100, 30000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", port))))
            except OSError:
                continue
        return first
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def slurm(*, binds: bool = False) -> Iterator[str]:
    """Run the cluster; gives the file that its commands read (``SLURM_CONF``).

    ``binds``: each node has all cores of this machine and two devices, and Slurm binds steps to what was requested.
    """
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root and Slurm")
    with tempfile.TemporaryDirectory(prefix="accelmark-slurm-") as directory:
        yield from _running(Path(directory) / "s", binds=binds)


def _running(home: Path, *, binds: bool) -> Iterator[str]:
    for name in ("state", *(f"spool-n{number}" for number in range(1, NUM_NODES + 1))):
        (home / name).mkdir(parents=True)
    home.chmod(0o755)
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o600)
    first = _free_ports(NUM_NODES + 1)
    conf = home / "slurm.conf"
    cores = len(os.sched_getaffinity(0))
    if binds:
        lines = (f"NodeName=n[1-{NUM_NODES}] Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero"))
        (home / "gres.conf").write_text("".join(lines))
    conf.write_text(
        _CONF.format(
            host=socket.gethostname().partition(".")[0], home=home, ctld=first + NUM_NODES, nodes=NUM_NODES,
            first=first, last=first + NUM_NODES - 1,
            binding="TaskPlugin=task/affinity\nGresTypes=gpu" if binds else "TaskPlugin=task/none",
            each=f"CPUs={cores} Gres=gpu:2" if binds else "CPUs=1",
        )
    )  # fmt: skip
    environment = os.environ | {"SLURM_CONF": str(conf)}
    munged = ["munged", "--foreground", "--force", f"--key-file={home}/munge.key", f"--socket={home}/munge.socket"]
    munged += [f"--pid-file={home}/munged.pid", f"--log-file={home}/munged.log", f"--seed-file={home}/munged.seed"]
    daemons = [munged, ["slurmctld", "-D", "-i"]]
    daemons += [["slurmd", "-D", "-N", f"n{number}"] for number in range(1, NUM_NODES + 1)]
    running: list[subprocess.Popen[bytes]] = []
    with (home / "output").open("wb") as output:
        try:
            for command in daemons:
                running.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
                )
                if command is munged:
                    _wait(lambda: (home / "munge.socket").exists(), home)
            idle = ["sinfo", "--noheader", "--format=%D %t"]
            wanted = f"{NUM_NODES} idle"
            _wait(lambda: wanted in subprocess.run(idle, env=environment, capture_output=True, text=True).stdout, home)
            yield str(conf)
        finally:
            for daemon in reversed(running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGTERM)
            for daemon in running:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _wait(condition: object, home: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 90
    while not condition():
        if time.monotonic() > deadline:
            found = [path for path in (home / "output", home / "slurmctld.log") if path.exists()]
            logs = [path.read_text(errors="replace")[-1500:] for path in found]
            raise RuntimeError("Slurm does not start: " + "\n".join(logs))
        time.sleep(0.2)
