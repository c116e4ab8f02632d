"""Searches on Ray workers of this machine, of a running cluster, and of SSH hosts with a real sshd."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import accelmark
from accelmark.automl.cluster import ssh_cluster
from accelmark.automl.config import AutomlConfig, ScheduleConfig, SshCluster, TrainingConfig
from accelmark.automl.controller import check_equal_data, start_search
from accelmark.automl.journal import EpochEvent, SearchDirectory, SearchState, find_search, read_journal
from accelmark.automl.records import Splits, WorkerReady
from accelmark.automl.scoring import lineage, verify_search
from accelmark.spec.errors import RequestError, RunError
from tests.automl.images import tiny_dataset, tiny_network
from tests.telemetry.recorder import until

PROGRAM = """
import sys
from accelmark.cli.automl import app
from accelmark.spec.errors import AccelmarkError
try:
    app()
except AccelmarkError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
CONFIG = {
    "network": "net.json",
    "training": {"batch_size": 32, "learning_rate": 0.05},
    "tuning": {"kernel": [3, 5], "dropout": [0.0, 0.5]},
}


def workers_below(ancestor: psutil.Process) -> list[psutil.Process]:
    """Return the processes of Ray that do trials; those that end meanwhile are none of them."""
    found = []
    for one in ancestor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::TrialWorker" in " ".join(one.cmdline()):
                found.append(one)
    return found


class Search:
    """One search in a folder of its own, driven through the command line in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.json").write_text(tiny_network().to_json())
        self.dataset = tiny_dataset(folder)
        self.started: list[subprocess.Popen[str]] = []
        self.launcher: tuple[str, ...] = ()
        """Command that starts the search, such as srun."""

    def configure(self, **changes: object) -> Path:
        path = self.folder / "search.json"
        path.write_text(json.dumps(CONFIG | {"dataset": self.dataset.model_dump(mode="json")} | changes))
        return path

    def begin(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.launcher, sys.executable, "-c", PROGRAM, *words, "--runs", str(self.folder / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout_s: float = 500) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def run(self) -> SearchDirectory:
        return find_search("latest", self.folder / "runs")

    def wait_for(self, what: Callable[[], bool], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline or (self.started[-1].poll() is not None):
                pytest.fail(f"never happened; the search said: {self.finish(self.started[-1])}")
            time.sleep(0.05)

    def epochs(self) -> int:
        try:
            return sum(isinstance(event, EpochEvent) for event in read_journal(self.run().path))
        except Exception:  # noqa: BLE001 - the run may not be there yet
            return 0

    def workers(self) -> list[psutil.Process]:
        return workers_below(psutil.Process(self.started[-1].pid))

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        with contextlib.suppress(ProcessLookupError):
            for process in self.started:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    made = Search(tmp_path)
    yield made
    made.end()


SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """A real sshd on a free port that lets one key in; gives the client's configuration, host key checked."""
    if not Path(SSHD).exists():
        pytest.skip("no sshd here")
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
        kind="ssh",
        hosts=hosts,
        head_address="127.0.0.1",
        python=sys.executable,
        port=free_port(),
        ssh_config=ssh_config,
    )


@pytest.mark.heavy
def test_a_search_runs_on_ssh_hosts_and_leaves_nothing_behind(tmp_path: Path, ssh_config: Path) -> None:
    (tmp_path / "net.json").write_text(tiny_network().to_json())
    config = AutomlConfig(
        network=str(tmp_path / "net.json"),
        dataset=tiny_dataset(tmp_path),
        schedule=ScheduleConfig(concurrency=1, max_trials=1, round_epochs=(1,)),
        training=TrainingConfig(batch_size=32),
        cluster=(nodes := cluster(ssh_config, "node1")),
    )
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


@pytest.mark.heavy
def test_a_killed_search_resumes_to_its_last_trial_with_the_right_score(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 5, "round_epochs": [3], "tuning_round": 2}
    search.begin("run", "-c", str(search.configure(schedule=schedule)))
    search.wait_for(lambda: search.epochs() >= 3)
    os.killpg(search.started[-1].pid, signal.SIGKILL)
    search.started[-1].wait()
    before = search.run().state()
    assert before.ended is None
    starting = search.begin("resume", "latest")
    search.wait_for(lambda: bool(psutil.Process(starting.pid).children()))  # Ray's processes
    starting.terminate()
    code, out, err = search.finish(starting, timeout_s=60)
    assert (code, out) == (130, "")
    assert f"Continue with: accelmark automl resume {search.run().path}" in err
    assert len(search.run().state().sessions) == 1, "it ended before its trials began"
    code, out, err = search.finish(search.begin("resume", "latest", "--json"))
    assert code == 0, err
    summary = json.loads(out)
    assert summary["trials"] == {"finished": 5}
    assert summary["interruptions"] == 1
    after = search.run().state()
    assert after.sessions[1].clock_s == pytest.approx(before.clock_s, abs=1.5)
    interrupted = [record for record in after.attempts.values() if record.status == "lost"]
    assert all(record.reason == "the run was interrupted" for record in interrupted)
    scored = {(record.trial, record.attempt) for record in after.useful() if after.epochs_of(record)}
    assert not scored & {(record.trial, record.attempt) for record in interrupted}
    judged = verify_search(search.run())
    assert judged.verdict == "VALID", judged.reasons
    events = list(read_journal(search.run().path))
    for end in range(len(events) + 1):
        explained = [agrees for agrees, *_ in lineage(events[:end], SearchState.of(events[:end]))]
        assert all(explained), "wherever a run is killed, what it wrote explains its networks"
    assert "has ended (all its trials are done)" in search.finish(search.begin("resume", "latest"))[2]
    assert search.finish(search.begin("verify", "latest"))[0] == 0
    (packed,) = (search.run().path / "ray" / "session2").iterdir()
    with tarfile.open(packed) as archive:
        assert {"logs/raylet.out", "logs/gcs_server.out"} <= set(archive.getnames())
    assert search.finish(search.begin("report", "latest", "--logs"))[0] == 0
    with tarfile.open(search.run().path / "logs.tar.gz") as archive:
        assert f"{search.run().path.name}/ray/session2/{packed.name}" in archive.getnames()


@pytest.mark.heavy
def test_trials_of_lost_and_stalled_workers_are_retried(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 2, "round_epochs": [60], "early_stop": False}
    training = {"batch_size": 32, "learning_rate": 0.01, "stall": "15s"}
    search.begin("run", "-c", str(search.configure(schedule=schedule, training=training)), "--json")
    search.wait_for(lambda: search.epochs() >= 2)
    one, other = search.workers()
    one.send_signal(signal.SIGKILL)
    other.send_signal(signal.SIGSTOP)
    code, out, err = search.finish(search.started[-1])
    assert code == 0, err
    assert json.loads(out)["trials"] == {"finished": 2}
    state = search.run().state()
    assert {record.status for record in state.attempts.values() if record.attempt == 1} == {"lost", "stalled"}
    assert {record.attempt for record in state.trials.values()} == {2}
    judged = verify_search(search.run())
    assert judged.verdict == "VALID", judged.reasons


@pytest.mark.heavy
def test_more_workers_than_there_are_is_refused_before_anything_starts(search: Search) -> None:
    schedule = {"concurrency": 4096, "max_trials": 1}
    code, _, err = search.finish(search.begin("run", "-c", str(search.configure(schedule=schedule))))
    assert code == 2
    assert "4096 concurrent trials" in err
    assert not (search.folder / "runs").exists()


CORES = 2
TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, psutil.Process]]:
    """Ray as a site would run it; gives its address and its process."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(Path(accelmark.__file__).parents[1])}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with tempfile.TemporaryDirectory(prefix="acmhead-", ignore_cleanup_errors=True) as folder:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--num-cpus={CORES}"),
                *("--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}"),
                *("--include-dashboard=false", "--disable-usage-stats"),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert server.stdout is not None
        for line in server.stdout:
            if "Ray runtime started" in line:
                break
        assert server.poll() is None
        parts = psutil.Process(server.pid).children(recursive=True)
        yield address, psutil.Process(server.pid)
        server.terminate()
        server.wait(300)
        server.stdout.close()
        for part in psutil.wait_procs(parts, timeout=60)[1]:
            part.kill()


def asked(search: Search, address: str, concurrency: int = CORES) -> tuple[int, str, str]:
    """Run a search on the cluster, as its user would who was given the token."""
    path = search.configure(
        schedule={"concurrency": concurrency, "max_trials": 3, "round_epochs": [1]},
        cluster={"kind": "address", "address": address},
    )
    return search.finish(search.begin("run", "-c", str(path), "--json", environment={"RAY_AUTH_TOKEN": TOKEN}))


@pytest.mark.heavy
def test_a_search_runs_on_a_running_cluster_and_leaves_it_running(
    search: Search, head: tuple[str, psutil.Process]
) -> None:
    code, out, err = asked(search, head[0])
    assert code == 0, err
    summary = json.loads(out)
    assert summary["trials"] == {"finished": 3}
    assert "own monitoring" in summary["consumption"]["reasons"]["mean_power_w"]
    assert verify_search(search.run()).verdict == "VALID"
    until(lambda: not workers_below(head[1]))
    assert head[1].is_running()


@pytest.mark.heavy
def test_more_workers_than_cluster_nodes_are_refused(search: Search, head: tuple[str, psutil.Process]) -> None:
    code, _, err = asked(search, head[0], concurrency=CORES + 1)
    assert code == 2
    assert f"the cluster has {CORES} processor cores, enough for {CORES}" in err
    assert not (search.folder / "runs").exists()


def test_an_address_without_a_cluster_is_reported(search: Search) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, _, err = asked(search, address)
    assert code == 1
    assert f"cannot connect to Ray at {address}" in err
    assert "check that the cluster runs" in err
    assert not (search.folder / "runs").exists()
