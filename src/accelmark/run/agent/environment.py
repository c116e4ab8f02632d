"""The environment that a job's ranks are started with."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import accelmark
from accelmark.run.agent.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.agent.task import AgentTask

TELEMETRY_MODULE = "accelmark.telemetry.record"
COMPILED_DIRECTORY = "compiled"
"""What the ranks compile, while they run: no round finds the work of an earlier one done."""
_PATH_VARIABLE = "PYTHONPATH"
_SINGLE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def rank_environment(task: AgentTask, node_dir: Path, ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process that starts ``task``'s ranks, on top of those that are set already.

    What the vendor and the cluster file set wins over ``ambient``; what AccelMark merely proposes (threads, visible
    devices, a place for what is compiled) gives way to it. A ``PYTHONPATH`` of theirs stands behind AccelMark's own.
    """
    environment = dict(ambient)
    proposals = {
        "OMP_NUM_THREADS": str(task.threads or threads_of_a_rank(task.nproc)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(node_dir / COMPILED_DIRECTORY),
    }
    if task.visible_devices is not None:
        proposals[task.visible_devices.variable] = ",".join(map(str, range(task.visible_devices.count)))
    for name, value in proposals.items():
        environment.setdefault(name, value)
    if task.threads is not None:
        environment["OMP_NUM_THREADS"] = str(task.threads)
    environment.update(task.environment)
    keep_ours_first(environment, ambient)
    environment.update(
        {
            RUN_MARKER: task.run,
            NODE_MARKER: str(node_dir),
            "MASTER_ADDR": task.master_address,
            "MASTER_PORT": str(task.master_port),
        }
    )
    if task.world_size == 1:
        environment.update(_SINGLE_RANK)
    return environment


def keep_ours_first(environment: dict[str, str], before: Mapping[str, str]) -> None:
    """Put this AccelMark first in a ``PYTHONPATH`` that was set or removed, if it stood there ``before``.

    Code that was brought to a host is found by nothing else. What stands where Python looks anyhow is left alone: put
    first, all that is installed would hide what the variable is there to offer.
    """
    ours = Path(accelmark.__file__).parents[1]
    if not _stands_in(ours, before) or ours == Path(sysconfig.get_path("purelib")):
        return
    named = environment.get(_PATH_VARIABLE)
    others = [entry for entry in named.split(os.pathsep) if Path(entry) != ours] if named else []
    if environment.get(_PATH_VARIABLE) != before[_PATH_VARIABLE]:
        environment[_PATH_VARIABLE] = os.pathsep.join([str(ours), *others])


def _stands_in(place: Path, environment: Mapping[str, str]) -> bool:
    entries = environment.get(_PATH_VARIABLE, "").split(os.pathsep)
    return any(Path(entry) == place for entry in entries if entry)


def agent_commands(task: AgentTask, node_dir: Path, python: str = sys.executable) -> list[list[str]]:
    """Return the commands that an agent starts: the telemetry recorder, then the ranks with what they are told."""
    recorder = [[python, "-m", TELEMETRY_MODULE, str(node_dir)]] if task.telemetry is not None else []
    told = ["env", *(f"{name}={value}" for name, value in task.environment.items())] if task.environment else []
    return [*recorder, [*told, *rank_command(task, python)]]


def threads_of_a_rank(nproc: int) -> int:
    """Return the cores that this process may use over the ranks of this host, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def rank_command(task: AgentTask, python: str = sys.executable) -> list[str]:
    """Return the command that starts the ranks on this host: ``python`` and ``job.json`` filled in.

    A job of several ranks has a launcher, which is told this host's place.
    """
    filled = {"python": python, "job.json": str(task.job_file)}
    command = [filled.get(argument, argument) for argument in task.command]
    if task.world_size == 1:
        return command
    command += ["--nproc", str(task.nproc), "--nnodes", str(task.nnodes), "--node-rank", str(task.noderank)]
    if task.nnodes > 1:
        command += ["--rdzv-endpoint", f"{task.master_address}:{task.master_port}"]
    if task.local_address is not None:
        command += ["--local-addr", task.local_address]
    return command
