"""The command and environment with which the ranks of a job are started on a host."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import accelmark
from accelmark.run.agent.task import AgentTask
from accelmark.run.processes import NODE_MARKER, RUN_MARKER
from accelmark.spec.plugins.catalog import load_framework, load_launch
from accelmark.spec.plugins.framework import HostPlace, Launch

TELEMETRY_MODULE = "accelmark.telemetry.record"
_PATH_VARIABLE = "PYTHONPATH"


def rank_environment(task: AgentTask, node_dir: Path, ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process that starts ``task``'s ranks, in addition to those that are set already.

    Variables of the vendor and the cluster file take precedence over ``ambient``, and both over AccelMark's defaults
    (threads, visible devices, directories of caches). Their ``PYTHONPATH`` is appended to AccelMark's.
    """
    environment = dict(ambient)
    launch = launch_of(task)
    proposals = {
        "OMP_NUM_THREADS": str(task.threads or threads_of_a_rank(task.num_ranks)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **{name: str(node_dir / cache) for name, cache in load_framework(task.framework).caches.items()},
        **launch.defaults,
    }
    if task.visible_devices is not None:
        proposals[task.visible_devices.variable] = ",".join(map(str, range(task.visible_devices.count)))
    for name, value in proposals.items():
        environment.setdefault(name, value)
    if task.threads is not None:
        environment["OMP_NUM_THREADS"] = str(task.threads)
    environment.update(task.environment)
    keep_ours_first(environment, ambient)
    environment.update({RUN_MARKER: task.run, NODE_MARKER: str(node_dir), **launch.environment})
    return environment


def keep_ours_first(environment: dict[str, str], before: Mapping[str, str]) -> None:
    """Put this AccelMark first in a ``PYTHONPATH`` that was set or removed, if it was first ``before``.

    AccelMark delivered to a host is found by ``PYTHONPATH`` only. An AccelMark in site-packages is not put first, since
    all installed packages would then take precedence over those of the variable.
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
    """Return the commands that an agent starts: the telemetry recorder, then the ranks with their variables."""
    recorder = [[python, "-m", TELEMETRY_MODULE, str(node_dir)]] if task.telemetry is not None else []
    variables = task.environment
    env = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    return [*recorder, [*env, *launch_of(task, python).command]]


def threads_of_a_rank(num_ranks: int) -> int:
    """Return the cores that this process may use divided by the ranks of this host, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def launch_of(task: AgentTask, python: str = sys.executable) -> Launch:
    """Return how the task's framework starts its ranks on this host; ``python`` and ``job.json`` are filled in."""
    filled = {"python": python, "job.json": str(task.job_file)}
    place = HostPlace(
        nnodes=task.nnodes,
        nproc=task.nproc,
        num_ranks=task.num_ranks,
        noderank=task.noderank,
        master_address=task.master_address,
        master_port=task.master_port,
        local_address=task.local_address,
        interface=task.interface,
        servers=task.servers,
        python=python,
        rank_command=[filled.get(argument, argument) for argument in task.command],
    )
    return load_launch(task.framework).launch(place)
