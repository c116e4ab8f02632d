"""A Ray cluster on SSH hosts, with a real sshd, that leaves no process behind."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import accelmark
from accelmark.automl.cluster import ssh_cluster
from accelmark.automl.config import AutomlConfig, ScheduleConfig, SshCluster, TrainingConfig
from accelmark.automl.records import Splits, WorkerReady
from accelmark.automl.session import check_equal_data, start_search
from accelmark.spec.errors import RequestError, RunError
from tests.automl.images import tiny_dataset, tiny_network
from tests.telemetry.recorder import until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """A real sshd on a free port that lets one key in; gives the client's configuration, host key checked."""
    port, folder = free_port(), tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    source = Path(accelmark.__file__).parents[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nSetEnv PYTHONPATH={source}\n"
    )
    (folder / "config").write_text(
        f"Host node1\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/user\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    until(lambda: listens(port))
    yield folder / "config"
    server.terminate()
    server.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
        return True
    return False


def parts_of(port: int) -> set[int]:
    """Processes of the Ray cluster at that port; other tests may have theirs at the same time."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(port) in words and ("raylet" in words or "gcs_server" in words or "ray.scripts" in words):
            found.add(process.pid)
    return found


def cluster(ssh_config: Path, *hosts: str) -> SshCluster:
    return SshCluster(
        kind="ssh", hosts=hosts, head_address="127.0.0.1", python=sys.executable, port=free_port(),
        ssh_config=ssh_config,
    )  # fmt: skip


@pytest.mark.heavy
def test_a_search_runs_on_ssh_hosts_and_leaves_nothing_behind(tmp_path: Path, ssh_config: Path) -> None:
    (tmp_path / "net.json").write_text(tiny_network().to_json())
    config = AutomlConfig(
        network=str(tmp_path / "net.json"), dataset=tiny_dataset(tmp_path),
        schedule=ScheduleConfig(concurrency=1, max_trials=1, round_epochs=(1,)), training=TrainingConfig(batch_size=32),
        cluster=(nodes := cluster(ssh_config, "node1")),
    )  # fmt: skip
    seen: set[int] = set()
    variables = dict(os.environ)
    state = start_search(config, tmp_path / "runs", lambda run: seen.update(parts_of(nodes.port))).state()
    assert len(seen) >= 2
    assert state.ended is not None
    assert state.ended.reason == "trials"
    assert {record.status for record in state.trials.values()} == {"finished"}
    assert dict(os.environ) == variables  # Ray's own variables would make later runs of this process OPEN
    until(lambda: not parts_of(nodes.port))


@pytest.mark.heavy
def test_an_unreachable_host_is_named_and_the_others_are_ended(ssh_config: Path) -> None:
    nodes = cluster(ssh_config, "node2")
    message = r"node2: Ray cannot be started: cannot be reached at node2: Connection refused"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen, and nothing else can take its port
        port = silent.getsockname()[1]
        ssh_config.write_text(ssh_config.read_text() + f"Host node2\n  HostName 127.0.0.1\n  Port {port}\n")
        with pytest.raises(RunError, match=message), ssh_cluster(nodes):
            pytest.fail("a host that is not there cannot be part of a cluster")
    until(lambda: not parts_of(nodes.port))


def test_a_host_with_another_version_of_ray_is_refused() -> None:
    request = {"role": "node", "address": "127.0.0.1:1", "token": "t", "ray": "2.0.0"}
    command = [sys.executable, "-m", "accelmark.automl.trial.ray_node"]
    done = subprocess.run(command, input=json.dumps(request) + "\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    installed = importlib.metadata.version("ray")
    assert done.stderr == f"Ray {installed} is installed; the search uses 2.0.0: install that version\n"


def test_data_that_differ_between_hosts_are_named_with_their_hashes() -> None:
    splits = Splits(training=4, validation=2, held_out=2, classes=2)
    hosts = {"n1": "a", "n2": "a", "n3": "b"}
    ready = [WorkerReady(letter * 64, "arrays", splits, host) for host, letter in hosts.items()]
    check_equal_data(ready[:2], None)
    message = r"dataset: the data differ between hosts .*: n1 a{12}, n2 a{12}, n3 b{12}: copy one"
    with pytest.raises(RequestError, match=message):
        check_equal_data(ready, None)
