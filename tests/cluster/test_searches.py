"""AutoML searches on two SSH hosts, and in an allocation of Slurm: each is killed, leaves nothing, and is resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from accelmark.automl.scoring import verify_search
from tests.automl.controller.test_clusters import Search, free_port, search
from tests.cluster.bed import Bed
from tests.cluster.test_slurm import queue, slurm_conf
from tests.run.fakes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.heavy, pytest.mark.timeout(900)]
__all__ = ["search", "slurm_conf"]

NUM_TRIALS = 6
_WAIT_S = 300


def killed_and_resumed(search: Search, path: Path, is_clean: Callable[[], bool]) -> None:
    """Run a search until it has epochs, kill it, wait until nothing of it is left, and resume it to its last trial."""
    search.begin("run", "-c", str(path))
    search.wait_for(lambda: search.epochs() >= 3, _WAIT_S)
    os.kill(search.run().state().sessions[-1].pid, signal.SIGKILL)
    search.started[-1].wait(_WAIT_S)
    assert search.run().state().ended is None, "it was killed, not stopped"
    wait_for(is_clean, "nothing of the killed search", _WAIT_S)
    code, out, err = search.finish(search.begin("resume", "latest", "--json"))
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["trials"], summary["interruptions"]) == ({"finished": NUM_TRIALS}, 1)
    verified = verify_search(search.run())
    assert verified.verdict == "VALID", verified.reasons
    wait_for(is_clean, "nothing of the search that ended", _WAIT_S)


def test_a_search_on_two_ssh_hosts_is_killed_and_resumed(bed: Bed, search: Search) -> None:
    hosts = "".join(f"Host n{number}\n  HostName {bed.address(number)}\n" for number in (1, 2))
    keys = f"  IdentityFile {bed.root}/key\n  UserKnownHostsFile {bed.root}/known_hosts\n"
    (search.folder / "ssh_config").write_text(f"{hosts}Host *\n  User root\n  IdentitiesOnly yes\n{keys}")
    path = search.configure(
        # Ray fills a host to a half before it takes the next one: of three workers some are on each.
        schedule={"concurrency": 3, "max_trials": NUM_TRIALS, "round_epochs": [3], "tuning_round": 2},
        cluster={
            "kind": "ssh",
            "hosts": ["n1", "n2"],
            "head_address": f"{bed.net}.254",
            "python": "python3",
            "port": free_port(),
            "ssh_config": str(search.folder / "ssh_config"),
        },
    )

    killed_and_resumed(search, path, lambda: not bed.processes())
    finished = [record for record in search.run().state().trials.values() if record.status == "finished"]
    assert {record.host for record in finished} == {"n1", "n2"}


def test_a_search_in_an_allocation_of_slurm_is_killed_and_resumed_in_another_one(
    slurm_conf: str, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    search.launcher = ("salloc", "--quiet", "--nodes=1", "srun")
    path = search.configure(schedule={"max_trials": NUM_TRIALS, "round_epochs": [3], "tuning_round": 2})
    killed_and_resumed(search, path, lambda: not (queue() or in_allocations(slurm_conf)))


def in_allocations(slurm_conf: str) -> list[psutil.Process]:
    """Return the processes that were started in an allocation of this Slurm."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if "SLURM_STEP_ID" in variables and variables.get("SLURM_CONF") == slurm_conf:
                found.append(process)
    return found
