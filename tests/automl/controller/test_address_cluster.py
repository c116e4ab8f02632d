"""Searches on a running Ray cluster, which continues afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import accelmark
from accelmark.automl.scoring import verify_search
from tests.automl.controller.searching import Search, workers_below
from tests.automl.controller.test_ssh_cluster import free_port
from tests.telemetry.recorder import until

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
