"""Compare the facts and the clocks of a round's files: a file of another round, host or run contradicts the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from accelmark.results.read.rank_log import EventTime, EventTimes, MarkedTime, RankEnd
from accelmark.results.read.round_dir import NodeDir, ledger_events, planned_jobs, read_json
from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.consumption import HostSamples
from accelmark.results.rounds.timeline import Timeline
from accelmark.results.schema import Finding, finding
from accelmark.spec.job import ExternalJob, JobSpec
from accelmark.spec.log.perflog import event_names
from accelmark.spec.log.records import ClockReading, HostClocks, LogSeal
from accelmark.spec.number_format import limit_percent
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.secret import LEFT_OUT

MAX_DIFFERENCE: Final = 0.01
"""Largest relative difference of two clocks over the same span."""
_DELAY_S: Final = 1.0
"""Further difference allowed: on a busy machine a process may be interrupted between two readings, and sees what
another one did later than it happened."""
_SEEN_S: Final = 0.25
"""... between a rank's clock and the agent's, corrected by the kernel's time of writing; more is OPEN. It was at most
0.08 s over 230 spans of 0.1 to 560 s on a busy machine with two cores."""
_LATE_S: Final = 5.0
"""... by which the agent may see less time than the rank logged, because it saw the beginning late."""
_LAUNCH_S: Final = 120.0
"""... of the coordinator's span beyond the agent's, which includes its start and the copying of its last files."""
_MAX_BETWEEN_MARKS: Final = 0.2
"""Largest share of the windows' time outside of the marks of their steps, except waits for data."""
_MIN_BETWEEN_MARKS_S: Final = 1.0
_CLOCKS_RULE: Final = "clocks-disagree"
_SPANS: Final = (("TRAIN_START", "TRAIN_END"), ("FORWARD", "FORWARD"), ("INIT_START", "FINISHED"))
"""Pairs of events between which clocks are compared: from the first's first to the second's last occurrence."""


def clock_findings(
    round_dir: Path, nodes: Iterable[NodeDir], times: Mapping[str, EventTimes], *, is_translated: bool
) -> Iterator[Finding]:
    """Yield findings about clocks that are more than 1 % apart; clocks that the run did not record are not compared.

    ``times`` has the events of the first rank of each node directory. Those of training are not compared with the
    agent's where they are translated from a trainer's output (``is_translated``): they are logged later than they were.
    """
    contradictions: list[str] = []
    expected = f"at most {limit_percent(MAX_DIFFERENCE)} apart"
    for node in nodes:
        own = times.get(str(node.path), {})
        contradictions += _of_rank(f"{node.host}: the rank", own)
        clocks = node.exit.clocks if node.exit is not None else None
        if clocks is not None:
            contradictions += _of_agent(f"{node.host}: the agent", clocks)
            for is_large, what in _seen(node.host, own, clocks, is_translated=is_translated):
                yield finding("error" if is_large else "open", _CLOCKS_RULE, expected, what)
        if node.exit is not None:
            contradictions += _of_coordinator(round_dir, node.host, node.exit.duration_s)
    yield from (finding("error", _CLOCKS_RULE, expected, what) for what in dict.fromkeys(contradictions))


def step_clock_findings(timeline: Timeline, device_type: str) -> Iterator[Finding]:
    """Yield an error where the clock of the steps and the clock of the windows do not agree on the time of training."""
    marked: MarkedTime = timeline.marked
    outside_s = marked.wall_s - marked.span_s - marked.first_wait_s
    allowed_s = _MAX_BETWEEN_MARKS * marked.wall_s + _MIN_BETWEEN_MARKS_S
    if marked.span_s > marked.wall_s * (1 + MAX_DIFFERENCE) + _DELAY_S or outside_s > allowed_s:
        actual = f"windows of steps lasted {marked.wall_s:.2f} s, {marked.span_s:.2f} s by the clock that times steps"
        yield finding("error", _CLOCKS_RULE, "the marks of steps cover their windows", actual)
        return
    # On the host, nothing but the loop's own work lies between two steps. A device may wait for its host there.
    between_s = marked.span_s + marked.first_wait_s - timeline.compute_s - timeline.data_wait_s
    if device_type == "cpu" and len(timeline.ranks) == 1 and between_s > allowed_s:
        actual = (
            f"{timeline.compute_s:.2f} s of computation and {timeline.data_wait_s:.2f} s of waiting for data were "
            f"reported for {marked.span_s:.2f} s of steps"
        )
        yield finding("error", _CLOCKS_RULE, "steps and waits add up to their windows", actual)


def _differ(one_s: float, two_s: float, delay_s: float = _DELAY_S) -> bool:
    return abs(one_s - two_s) > MAX_DIFFERENCE * max(one_s, two_s) + delay_s


def _spans(times: EventTimes) -> Iterator[tuple[str, str, EventTime, EventTime]]:
    for begin, end in _SPANS:
        if begin in times and end in times:
            yield begin, end, times[begin][0], times[end][1]


def _of_rank(who: str, times: EventTimes) -> Iterator[str]:
    for begin, end, first, last in _spans(times):
        mono_s, wall_s = last.mono_s - first.mono_s, last.wall_s - first.wall_s
        if _differ(mono_s, wall_s):
            clocks = f"{mono_s:.2f} s by its monotonic clock, {wall_s:.2f} s by its wall clock"
            yield f"{who}: from {begin} to {end} {clocks}"


def _of_agent(who: str, clocks: HostClocks) -> Iterator[str]:
    mono_s, wall_s, uptime_s = _elapsed(clocks.began, clocks.ended)
    for name, other_s in (("its wall clock", wall_s), ("/proc/uptime", uptime_s)):
        if other_s is not None and _differ(mono_s, other_s):
            yield f"{who}: {mono_s:.2f} s by its monotonic clock, {other_s:.2f} s by {name}"


def _elapsed(first: ClockReading, last: ClockReading) -> tuple[float, float, float | None]:
    uptime_s = None
    if first.uptime_s is not None and last.uptime_s is not None:
        uptime_s = last.uptime_s - first.uptime_s
    return last.mono_s - first.mono_s, last.wall_s - first.wall_s, uptime_s


def _seen(host: str, times: EventTimes, clocks: HostClocks, *, is_translated: bool) -> Iterator[tuple[bool, str]]:
    """Yield whether a difference of the rank's clock from the agent's is too large for a busy machine, and its text."""
    for begin, end, first, last in _spans(times):
        if is_translated and begin == "TRAIN_START":
            continue
        if begin in clocks.seen and end in clocks.seen:
            logged_s = last.mono_s - first.mono_s
            seen_s = clocks.seen[end][1].mono_s - clocks.seen[begin][0].mono_s
            if _differ(logged_s, seen_s, _SEEN_S) and not 0 < logged_s - seen_s <= MAX_DIFFERENCE * logged_s + _LATE_S:
                clocks_s = f"{logged_s:.2f} s by the rank's clock, {seen_s:.2f} s by the agent's"
                yield _differ(logged_s, seen_s), f"{host}: from {begin} to {end} {clocks_s}"


def _of_coordinator(round_dir: Path, host: str, duration_s: float) -> Iterator[str]:
    """Compare the duration of the last attempt on a host with the coordinator's, which includes launch and copies."""
    name = f"{round_dir.parent.name}/{round_dir.name}"
    begin: Mapping[str, object] | None = None
    span = None
    for event in ledger_events(round_dir.parents[1]):
        if event.get("kind") == "run_resumed":
            begin = None  # another coordinator that follows the job notices its end late
        elif event.get("job") == name and event.get("state") is not None:
            begin, span = (event, None) if event["state"] == "running" else (None, span)
        elif event.get("job") == name and event.get("kind") == "agents_ended":
            span = (begin, event) if begin is not None else None
    if span is None:
        return
    begin, end = span
    try:
        wall_s = (datetime.fromisoformat(str(end["at"])) - datetime.fromisoformat(str(begin["at"]))).total_seconds()
    except (KeyError, ValueError):
        return
    if duration_s > wall_s * (1 + MAX_DIFFERENCE) + _DELAY_S or wall_s > duration_s * (1 + MAX_DIFFERENCE) + _LAUNCH_S:
        yield f"{host}: {duration_s:.2f} s by the agent's clock, {wall_s:.2f} s by the coordinator's wall clock"
    mono_s, uptime_s = (_difference(begin, end, field) for field in ("mono_s", "uptime_s"))
    for clock, other_s in (("monotonic clock", mono_s), ("/proc/uptime", uptime_s)):
        if other_s is not None and _differ(wall_s, other_s):
            yield f"the coordinator: {wall_s:.2f} s by its wall clock, {other_s:.2f} s by its {clock}"


def _difference(begin: Mapping[str, object], end: Mapping[str, object], field: str) -> float | None:
    first, last = begin.get(field), end.get(field)
    return last - first if isinstance(first, (int, float)) and isinstance(last, (int, float)) else None


_RECORDS_RULE: Final = "records-disagree"
_TIME_S: Final = 1.0
"""Between the reading of a clock and the event that states it, in which a busy machine may interrupt the rank."""
_RECORDER_S: Final = 30.0
"""The recorder starts after the agent, and ends within this time of its ranks."""
_OFFSET_S: Final = 5.0
"""Difference of the offsets between wall and monotonic clock of two processes of a host, which NTP may correct."""
_ON_HOSTS: Final = ("checkpoint_dir", "resume", "case", "extern", "seed")
"""Fields of a job that differ between the plan and ``job.json``: paths, and what is drawn at its start."""


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
    return finding("error", _RECORDS_RULE, "", actual)


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
        present = {rank for rank, _ in node.rank_logs()} | {rank.rank for rank in node.exit.ranks}
        for rank, log in node.rank_logs():
            seal, content = node.exit.logs.get(rank), log.read_bytes()
            sealed = content[: seal.num_bytes] if seal is not None else b""
            if seal is None or LEFT_OUT.encode() in content:
                continue
            if LogSeal.of(sealed) != seal or event_names(content[seal.num_bytes :]):
                yield f"{log.name} is not the log that rank {rank} left when it ended"
        if present - expected:
            yield f"has files of ranks {', '.join(map(str, sorted(present - expected)))}, which belong to other hosts"


def _is_name(host: Any, directory: str) -> bool:
    """Return whether a directory is named after ``host``, in which unusual characters are replaced."""
    return (
        isinstance(host, str)
        and len(host) >= len(directory)
        and all(one == two or two == "-" for one, two in zip(host, directory))
    )


def _device_names(host: str, chip: Chip | None, samples: Samples) -> Iterator[Finding]:
    """Yield errors about devices that telemetry, which runs outside of the ranks, names differently from the chip."""
    for index in samples.devices:
        name = samples.infos.get(index, {}).get("name")
        if chip is not None and name and not chip.matches_name(str(name)):
            yield finding(
                "error", "chip-mismatch", chip.title, f"{host}: telemetry reads that device {index} is {name!r}"
            )


def _telemetry(node: NodeDir, samples: Samples, own: EventTimes) -> Iterator[str]:
    if samples.is_edited:
        yield "was edited: its lines do not have the hash that the recorder states at their end"
    t, wall = samples.header.get("t"), samples.header.get("wall")
    if not isinstance(t, (int, float)) or not isinstance(wall, (int, float)):
        return
    if "INIT_START" in own:
        first = own["INIT_START"][0]
        offset_s = abs((wall - t) - (first.wall_s - first.mono_s))
        if offset_s > _OFFSET_S:
            yield f"was recorded by other clocks: {offset_s:,.0f} s from the rank's clocks"
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
