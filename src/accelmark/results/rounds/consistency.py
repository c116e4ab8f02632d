"""Compare the facts that several files of a round state: a file of another round, host or run contradicts the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from accelmark.results.figures.consumption import HostSamples
from accelmark.results.figures.timeline import Timeline
from accelmark.results.read.rank_log import EventTimes, RankEnd
from accelmark.results.read.round_dir import NodeDir, planned_jobs, read_json
from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.clocks import clock_findings
from accelmark.results.schema import Finding, finding
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.plugins.vendor import Chip

_RULE: Final = "records-agree"
_TIME_S: Final = 1.0
"""Between the reading of a clock and the event that states it, in which a busy machine may interrupt the rank."""
_RECORDER_S: Final = 30.0
"""The recorder starts after the agent, and ends within this time of its ranks."""
_OFFSET_S: Final = 5.0
"""Difference of the offsets between wall and monotonic clock of two processes of a host, which NTP may correct."""
_ON_HOSTS: Final = ("checkpoint_dir", "resume", "case", "extern")
"""Fields of a job that differ between the plan and ``job.json``: paths."""


def agreement_findings(
    round_dir: Path, job: JobSpec, nodes: Sequence[NodeDir], times: Mapping[str, EventTimes], hosts: HostSamples
) -> Iterator[Finding]:
    """Yield errors about files that contradict the plan, their directory or each other, and about clocks.

    ``times`` has the events of the first rank of each node directory, ``hosts`` the telemetry of each host.
    """
    yield from (_error(what) for what in _job_contradictions(round_dir, job))
    for node in nodes:
        yield from (_error(f"{node.path.name}: {what}") for what in _node_contradictions(job, node))
        if node.host in hosts:
            samples = hosts[node.host][0]
            own = times.get(str(node.path), {})
            yield from (_error(f"{node.path.name}: telemetry.jsonl {what}") for what in _telemetry(node, samples, own))
            yield from _device_names(node.host, job.chip, samples)
    yield from clock_findings(round_dir, nodes, times, is_translated=isinstance(job.work, ExternalJob))


def log_findings(timeline: Timeline, job: JobSpec, samples_per_step: int) -> Iterator[Finding]:
    """Yield errors about FINISHED events that contradict the events before them, and about counts of samples."""
    for end in timeline.ranks:
        yield from (_error(f"rank {end.rank}: {what}") for what in _end_contradictions(timeline, end))
    expected = timeline.num_steps * samples_per_step
    if job.num_ranks == job.key.world_size and timeline.num_samples != expected:
        steps = f"{timeline.num_steps} steps of {samples_per_step} samples"
        yield _error(f"windows state {timeline.num_samples} samples for {steps}, which are {expected}")
    worlds = {end.started.world_size for end in timeline.ranks if end.started is not None}
    if worlds - {job.num_ranks}:
        yield _error(f"ranks report {', '.join(map(str, sorted(worlds)))} ranks, the job has {job.num_ranks}")


def _error(actual: str) -> Finding:
    return finding("error", _RULE, "", actual)


def _job_contradictions(round_dir: Path, job: JobSpec) -> Iterator[str]:
    if round_dir.name != f"round{job.round}":
        yield f"job.json is of round {job.round}, in the directory {round_dir.name}"
    plan, stated = read_json(round_dir.parents[1] / "plan.json"), read_json(round_dir / "job.json")
    planned = planned_jobs(plan).get(f"{round_dir.parent.name}/{round_dir.name}", {})
    if names := [name for name, value in planned.items() if name not in _ON_HOSTS and stated.get(name) != value]:
        yield f"job.json and plan.json differ in {', '.join(sorted(names))}"


def _node_contradictions(job: JobSpec, node: NodeDir) -> Iterator[str]:
    stated: list[tuple[str, Any, Any]] = []
    if node.exit is not None:
        stated += [("exit.json", node.exit.host, node.exit.noderank)]
    task = read_json(node.path / "agent.json")
    if "host" in task:
        stated += [("agent.json", task["host"], task.get("noderank"))]
    for file, host, noderank in stated:
        if noderank != node.noderank or not _is_name(host, node.host):
            yield f"{file} is of host {host}, noderank {noderank}"
    if node.exit is not None:
        per_host = job.ranks_per_host or job.key.nproc
        expected = set(range(node.noderank * per_host, (node.noderank + 1) * per_host))
        found = {rank for rank, _ in node.rank_logs()} | {rank.rank for rank in node.exit.ranks}
        if found - expected:
            yield f"has files of ranks {', '.join(map(str, sorted(found - expected)))}, which belong to other hosts"


def _is_name(host: Any, directory: str) -> bool:
    """Return whether a directory's name is that of ``host``, in which unusual characters are replaced."""
    return (
        isinstance(host, str)
        and len(host) >= len(directory)
        and all(one == two or two == "-" for one, two in zip(host, directory, strict=False))
    )


def _device_names(host: str, chip: Chip | None, samples: Samples) -> Iterator[Finding]:
    """Yield errors about devices that telemetry, which runs outside of the ranks, names differently from the chip."""
    for index in samples.devices:
        name = samples.infos.get(index, {}).get("name")
        if chip is not None and name and not chip.matches_name(str(name)):
            yield finding(
                "error", "chip-identity", chip.title, f"{host}: telemetry reads that device {index} is {name!r}"
            )


def _telemetry(node: NodeDir, samples: Samples, own: EventTimes) -> Iterator[str]:
    if samples.is_edited:
        yield "was edited: its lines do not have the hash that the recorder states at their end"
    t, wall = samples.header.get("t"), samples.header.get("wall")
    if not isinstance(t, int | float) or not isinstance(wall, int | float):
        return
    if "INIT_START" in own:
        first = own["INIT_START"][0]
        offset_s = abs((wall - t) - (first.wall_s - first.mono_s))
        if offset_s > _OFFSET_S:
            yield f"was recorded by other clocks: {offset_s:,.0f} s apart from those of the rank"
            return
    if node.exit is not None and (began := _unix(node.exit.started_at)) is not None:
        ended = began + node.exit.duration_s
        if not began - _OFFSET_S <= wall <= ended + _RECORDER_S:
            yield f"was not recorded in this round: it begins {wall - began:,.0f} s after the node agent's start"


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _end_contradictions(timeline: Timeline, end: RankEnd) -> Iterator[str]:
    done = end.finished
    if done is None or done.state != "completed" or timeline.num_attempts > 1:
        return
    if end.rank == timeline.lead:
        counts = (done.global_steps, done.num_trained_samples), (timeline.num_steps, timeline.num_samples)
        if counts[0] != counts[1] and timeline.num_steps:
            yield f"FINISHED states {counts[0][0]} steps and {counts[0][1]} samples, its windows {counts[1]}"
        if not math.isclose(done.raw_train_time, timeline.train_s, rel_tol=0.01, abs_tol=_TIME_S):
            yield f"FINISHED states {done.raw_train_time:.2f} s of training, its events {timeline.train_s:.2f} s"
        if timeline.evaluations and done.final_metrics != timeline.evaluations[-1].evaluation.metrics:
            stated, evaluated = dict(done.final_metrics), dict(timeline.evaluations[-1].evaluation.metrics)
            yield f"FINISHED states the metrics {stated}, the last EVALUATE {evaluated}"
