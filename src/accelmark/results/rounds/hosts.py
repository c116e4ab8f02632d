"""Read what the hosts of a round recorded besides the ranks' logs, and compare the facts and clocks of all its files.

Other work is detected on a host before the round, on its devices, and by waits for CPU cores during the round. A file
of another round, host or run contradicts the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from accelmark.results.read.rank_log import EventTimes
from accelmark.results.read.round_dir import NodeDir, ledger_events, ledger_states, planned_jobs, read_json
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.rounds.consumption import HostSamples, Spans
from accelmark.results.rounds.timeline import Timeline
from accelmark.results.schema import Environment, Finding, JobState, Mark, RoundResult, Severity, finding
from accelmark.spec.backports import pairwise
from accelmark.spec.job import ExternalJob, JobSpec, TrainingWork
from accelmark.spec.log.events import FinishedBase
from accelmark.spec.log.perflog import event_names
from accelmark.spec.log.records import LogSeal
from accelmark.spec.model import Spec
from accelmark.spec.number_format import limit_percent, percent
from accelmark.spec.secret import LEFT_OUT

MAX_CPU_WAIT_SHARE: Final = 0.02
"""Share of a rank's time that a thread may wait for a core."""
MIN_OTHERS_SHARE: Final = 0.5
"""CPU time of other processes, as a share of the wait, from which they explain it."""
MIN_CPU_WAIT_S: Final = 0.5
"""Shorter waits are ignored: AccelMark's own start-up uses some CPU time too."""
_ADVICE: Final = ". Use an idle host."
_WORST_FIRST: Final[tuple[JobState, ...]] = ("failed", "timed_out", "lost", "cancelled")


def read_telemetry(
    nodes: list[NodeDir], spans_by_node: Mapping[str, Spans], findings: list[Finding], before: Sequence[NodeDir] = ()
) -> tuple[HostSamples, str]:
    """Return the samples of every host, and the reason where there are none.

    ``spans_by_node`` has the measured time of each node directory in seconds of that host's monotonic clock, of every
    attempt. ``before`` has the hosts of the attempts that the last one continued; where a host was restarted since,
    its clock began again, and its earlier samples are left out. Problems of the telemetry are appended to ``findings``.
    """
    hosts: dict[str, tuple[Samples, Spans]] = {}
    missing: list[tuple[NodeDir, str]] = []
    for node in nodes:
        spans = spans_by_node.get(str(node.path), ())
        path = node.path / "telemetry.jsonl"
        if not path.is_file():
            missing.append((node, f"{node.host}: telemetry.jsonl is missing"))
            continue
        is_one_clock = all(earlier < later for (_, earlier), (later, _) in pairwise(spans))
        earlier = [old.path / path.name for old in before if old.path.name == node.path.name and is_one_clock]
        samples = read_samples(*(record for record in earlier if record.is_file()), path)
        if not len(samples.t):
            missing.append((node, f"{node.host}: telemetry.jsonl has no samples"))
        if not len(samples.t) or not spans:
            continue
        task = read_json(node.path / "agent.json")
        num_ranks = int(task.get("nproc") or len(node.rank_logs()))
        variable = (task.get("visible_devices") or {}).get("variable")
        visible = (read_json(node.path / "sys_info.json").get("environment") or {}).get(variable)
        selected = [entry.strip() for entry in visible.split(",")] if visible and isinstance(visible, str) else None
        indices = None if selected is None else device_indices(selected[:num_ranks], samples.infos)
        if indices is None and len(samples.devices) > num_ranks:
            indices = sorted(samples.devices)[:num_ranks]
        if indices is not None:
            samples.devices = {index: columns for index, columns in samples.devices.items() if index in indices}
        if not samples.devices:
            unmatched = selected is not None and indices == [] and samples.infos
            why = f"none of them has the UUID {', '.join(selected or ())}" if unmatched else samples.reason("devices")
            actual = f"{node.host}: no samples of the ranks' devices: {why}"
            findings.append(finding("open", "telemetry-missing", "", actual))
        hosts[node.host] = (samples, spans)
        findings += _telemetry_findings(node.host, samples)
    for node, what in missing:
        if node.exit is None or node.exit.state == "succeeded" or node.rank_logs():
            findings.append(finding("error", "telemetry-missing", "samples from every host", what))
    if missing:
        return {}, missing[0][1]
    return hosts, "" if hosts else "nothing was measured"


def device_indices(entries: Iterable[str], infos: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the telemetry's indices of the devices that ``entries`` select.

    An entry is an index, or a UUID (``GPU-8932f937-...``) that may be shortened as far as it is unique. Without a match
    (a UUID of part of a device, such as ``MIG-...``) all are left out: the sum over some would be wrong.
    """
    uuids = {index: str(info.get("uuid") or "").lower() for index, info in infos.items()}
    indices: list[int] = []
    for entry in entries:
        matching = [index for index, uuid in uuids.items() if entry and uuid.startswith(entry.lower())]
        matching = [int(entry)] if entry.isdigit() else matching
        if len(matching) != 1:
            return []
        indices += matching
    return indices


def _telemetry_findings(host: str, samples: Samples) -> Iterable[Finding]:
    if samples.footer is None:
        actual = f"{host}: the recorder wrote no end: it was killed, or the host was lost"
        yield finding("open", "telemetry-missing", "samples of the whole round", actual)
    for note in samples.notes:
        if note.startswith("suspended: "):
            yield finding("open", "telemetry-missing", "samples of the whole round", f"{host}: {note}")
            continue
        rule = "foreign-process" if note.startswith("foreign ") else "telemetry-note"
        yield finding("warning", rule, "", f"{host}: {note}")
    if samples.malformed:
        actual = f"{host}: {samples.malformed} malformed lines in telemetry"
        yield finding("warning", "telemetry-unreadable", "", actual)
    for constant in filter(None, map(samples.constant_power, samples.devices)):
        yield finding("open", "constant-power", "readings of a sensor, which vary", f"{host}: {constant}")
    for index, reasons in samples.throttle.items():
        active = sorted(reasons - {"idle", "gpu_idle", "none"})
        if active:
            yield finding("info", "throttled", "", f"{host} device {index}: clocks were throttled: {', '.join(active)}")


def disturbances(findings: Iterable[Finding]) -> list[str]:
    """Return the findings that report other work on the machines, without the advice to use idle ones."""
    rules = ("foreign-process", "busy-at-start", "cpu-contention")
    return [found.actual.removesuffix(_ADVICE) for found in findings if found.rule in rules]


def contention_findings(nodes: Iterable[NodeDir], finished: Mapping[int, FinishedBase | None]) -> Iterable[Finding]:
    """Yield warnings about other work on the hosts before a round, and about ranks that waited for CPU cores."""
    others: list[float] = []
    for node in nodes:
        if node.exit is not None and node.exit.others_cpu_s is not None:
            others.append(node.exit.others_cpu_s)
        reasons = read_json(node.path / "sys_info.json").get("busy_at_start")
        for reason in reasons if isinstance(reasons, list) else ():
            yield finding("warning", "busy-at-start", "", f"{node.host}: {reason}{_ADVICE}")
    for rank, end in finished.items():
        if end is None or end.core_wait_s is None or end.e2e_time <= 0:
            continue
        share = end.core_wait_s / end.e2e_time
        if share > MAX_CPU_WAIT_SHARE and end.core_wait_s > MIN_CPU_WAIT_S:
            limit = f"limit {limit_percent(MAX_CPU_WAIT_SHARE)}"
            waited = f"rank {rank} waited for CPU cores {percent(share)} of the time ({limit})"
            if not others or max(others) >= MIN_OTHERS_SHARE * end.core_wait_s:
                used = f"used up to {max(others):.1f} s of CPU time" if others else "may have used them"
                yield finding("warning", "cpu-contention", "", f"{waited}: other work {used}{_ADVICE}")
            else:
                yield finding("warning", "oversubscribed", "", f"{waited}: the job has more threads than cores.")


def job_state(
    round_dir: Path, job: JobSpec, nodes: list[NodeDir], rank_error: str | None, *, has_events: bool
) -> tuple[JobState, str | None]:
    """Return the state of a round and, unless it succeeded, the reason; the coordinator's record takes precedence."""
    ledger = ledger_states(round_dir.parents[1]).get(f"{round_dir.parent.name}/{round_dir.name}")
    if ledger is not None and ledger[0] in _WORST_FIRST:
        return ledger[0], ledger[1] or rank_error or f"the coordinator recorded the state {ledger[0]}"
    exits = [(node, node.exit) for node in nodes if node.exit is not None]
    for state in _WORST_FIRST:
        for node, node_exit in exits:
            if node_exit.state == state:
                failed = next((rank for rank in node_exit.ranks if rank.state != "succeeded"), None)
                reason = node_exit.reason or rank_error or f"{node.host}: the node's state is {node_exit.state}"
                if failed is not None and not node_exit.reason:
                    reason = f"{node.host}, rank {failed.rank}: {failed.reason or failed.state}"
                return state, reason
    if len(exits) < job.key.nnodes:
        if ledger is not None and ledger[0] != "succeeded":
            return ledger[0], ledger[1] or "the job has not ended"
        if not nodes:
            return "queued", "the job was not started"
        missing = [node.problem for node in nodes if node.problem]
        return "lost", missing[0] if missing else f"{job.key.nnodes - len(exits)} hosts wrote no files"
    if not has_events:
        return "failed", "no rank wrote an event"
    return ("failed", rank_error) if rank_error else ("succeeded", None)


def round_of(
    job: JobSpec,
    state: tuple[JobState, str | None],
    nodes: Sequence[NodeDir],
    findings: Sequence[Finding],
    events: Mapping[str, Spec | None],
    *,
    synthetic: bool = False,
    partial_evaluation: bool = False,
    resumed: bool = False,
    **own: Any,
) -> RoundResult:
    """Return the result of a round with what is the same for all tasks; ``events`` are rank 0's, ``own`` the rest."""
    exits = tuple(node.exit for node in nodes if node.exit)
    marks: dict[Mark, bool] = {
        "open": job.open or any(setting.forced for setting in job.provenance.values()),
        "synthetic": synthetic,
        "made_up_data": isinstance(job.work, TrainingWork) and job.work.made_up_data,
        "partial": state[0] != "succeeded",
        "partial_evaluation": partial_evaluation,
        "busy_machine": bool(disturbances(findings)),
        "resumed": resumed,
        "bad_samples": any(found.rule == "samples-replaced" for found in findings),
        "speed_only": isinstance(job.work, TrainingWork) and not (job.work.target or job.work.reference_loss),
    }
    described = tuple({"host": node.host} | read_json(node.path / "sys_info.json") for node in nodes)
    reported = {name: event.model_dump() for name, event in events.items() if event is not None}
    common = {name: getattr(job, name) for name in ("key", "round", "case_version", "vendor", "chip", "role")} | {
        "unit": job.work.unit,
        "state": state[0],
        "reason": state[1],
        "converged": None,
        "precision": job.work.precision,
        "started_at": min((end.started_at for end in exits), default=""),
        "min_rounds": job.work.min_repeats,
        "rules": None if job.rules is None else job.rules.title,
        "nodes": exits,
        "settings": job.provenance,
        "findings": tuple(findings),
        "marks": tuple(mark for mark, applies in marks.items() if applies),
        "environment": Environment(hosts=described, **reported),
    }
    return RoundResult(**(common | own))


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
        spans = [(begin, end, own[begin][0], own[end][1]) for begin, end in _SPANS if begin in own and end in own]
        for begin, end, first, last in spans:
            mono_s, wall_s = last.mono_s - first.mono_s, last.wall_s - first.wall_s
            if _differ(mono_s, wall_s):
                clocks_s = f"{mono_s:.2f} s by its monotonic clock, {wall_s:.2f} s by its wall clock"
                contradictions.append(f"{node.host}: the rank: from {begin} to {end} {clocks_s}")
        if node.exit is None:
            continue
        if (clocks := node.exit.clocks) is not None:
            began, ended = clocks.began, clocks.ended
            mono_s, others = ended.mono_s - began.mono_s, {"its wall clock": ended.wall_s - began.wall_s}
            if began.uptime_s is not None and ended.uptime_s is not None:
                others["/proc/uptime"] = ended.uptime_s - began.uptime_s
            contradictions += (
                f"{node.host}: the agent: {mono_s:.2f} s by its monotonic clock, {other_s:.2f} s by {name}"
                for name, other_s in others.items()
                if _differ(mono_s, other_s)
            )
            for begin, end, first, last in spans:
                if begin in clocks.seen and end in clocks.seen and not (is_translated and begin == "TRAIN_START"):
                    rank_s = last.mono_s - first.mono_s
                    seen_s = clocks.seen[end][1].mono_s - clocks.seen[begin][0].mono_s
                    is_late = 0 < rank_s - seen_s <= MAX_DIFFERENCE * rank_s + _LATE_S
                    if _differ(rank_s, seen_s, _SEEN_S) and not is_late:
                        both_s = f"{begin} to {end} {rank_s:.2f} s by the rank's clock, {seen_s:.2f} s by the agent's"
                        severity: Severity = "error" if _differ(rank_s, seen_s) else "open"  # a busy machine
                        yield finding(severity, _CLOCKS_RULE, expected, f"{node.host}: from {both_s}")
        contradictions += _of_coordinator(round_dir, node.host, node.exit.duration_s)
    yield from (finding("error", _CLOCKS_RULE, expected, what) for what in dict.fromkeys(contradictions))


def step_clock_findings(timeline: Timeline, device_type: str) -> Iterator[Finding]:
    """Yield an error where the clock of the steps and the clock of the windows do not agree on the time of training."""
    wall_s, span_s, wait_s = timeline.lead.marked_wall_s, timeline.lead.marked_span_s, timeline.lead.first_wait_s
    allowed_s = _MAX_BETWEEN_MARKS * wall_s + _MIN_BETWEEN_MARKS_S
    if span_s > wall_s * (1 + MAX_DIFFERENCE) + _DELAY_S or wall_s - span_s - wait_s > allowed_s:
        actual = f"windows of steps lasted {wall_s:.2f} s, {span_s:.2f} s by the clock that times steps"
        yield finding("error", _CLOCKS_RULE, "the marks of steps cover their windows", actual)
        return
    # On the host, nothing but the loop's own work lies between two steps. A device may wait for its host there.
    between_s = span_s + wait_s - timeline.compute_s - timeline.data_wait_s
    if device_type == "cpu" and len(timeline.ranks) == 1 and between_s > allowed_s:
        parts = f"{timeline.compute_s:.2f} s of computation and {timeline.data_wait_s:.2f} s of waiting for data"
        actual = f"{parts} were reported for {span_s:.2f} s of steps"
        yield finding("error", _CLOCKS_RULE, "steps and waits add up to their windows", actual)


def _differ(one_s: float, two_s: float, delay_s: float = _DELAY_S) -> bool:
    return abs(one_s - two_s) > MAX_DIFFERENCE * max(one_s, two_s) + delay_s


def _of_coordinator(round_dir: Path, host: str, duration_s: float) -> Iterator[str]:
    """Compare the duration of the last attempt on a host with the coordinator's, which includes launch and copies."""
    name = f"{round_dir.parent.name}/{round_dir.name}"
    begin: Mapping[str, Any] | None = None
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
    for clock, field in (("monotonic clock", "mono_s"), ("/proc/uptime", "uptime_s")):
        with suppress(KeyError, TypeError):
            other_s = float(end[field] - begin[field])
            if _differ(wall_s, other_s):
                yield f"the coordinator: {wall_s:.2f} s by its wall clock, {other_s:.2f} s by its {clock}"


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
    """Yield errors about files that contradict the plan, their directory or each other, and about clocks."""
    if round_dir.name != f"round{job.round}":
        yield _error(f"job.json is of round {job.round}, in the directory {round_dir.name}")
    plan, stated = read_json(round_dir.parents[1] / "plan.json"), read_json(round_dir / "job.json")
    planned = planned_jobs(plan).get(f"{round_dir.parent.name}/{round_dir.name}", {})
    if names := [name for name, value in planned.items() if name not in _ON_HOSTS and stated.get(name) != value]:
        yield _error(f"job.json and plan.json differ in {', '.join(sorted(names))}")
    for node in nodes:
        yield from (_error(f"{node.path.name}: {what}") for what in _node_contradictions(job, node))
        if node.host in hosts:
            samples = hosts[node.host][0]
            own = times.get(str(node.path), {})
            yield from (_error(f"{node.path.name}: telemetry.jsonl {what}") for what in _telemetry(node, samples, own))
            for index in samples.devices:  # as telemetry names them, which runs outside of the ranks
                name = samples.infos.get(index, {}).get("name")
                if job.chip is not None and name and not job.chip.matches_name(str(name)):
                    actual = f"{node.host}: telemetry reads that device {index} is {name!r}"
                    yield finding("error", "chip-mismatch", job.chip.title, actual)
    yield from clock_findings(round_dir, nodes, times, is_translated=isinstance(job.work, ExternalJob))


def log_findings(timeline: Timeline, job: JobSpec, samples_per_step: int) -> Iterator[Finding]:
    """Yield errors about a FINISHED event that contradicts the events before it, and about counts of samples."""
    done = timeline.lead.end.finished
    if done is not None and done.state == "completed" and len(timeline.lead.attempts) == 1:
        stated = f"rank {timeline.lead.end.rank}: FINISHED states"
        counts = (done.global_steps, done.num_trained_samples), (timeline.num_steps, timeline.num_samples)
        if counts[0] != counts[1] and timeline.num_steps:
            yield _error(f"{stated} {counts[0][0]} steps and {counts[0][1]} samples, its windows {counts[1]}")
        if not math.isclose(done.raw_train_time, timeline.train_s, rel_tol=0.01, abs_tol=_TIME_S):
            yield _error(f"{stated} {done.raw_train_time:.2f} s of training, its events {timeline.train_s:.2f} s")
        if timeline.evaluations and done.final_metrics != timeline.evaluations[-1][1].metrics:
            evaluated = dict(timeline.evaluations[-1][1].metrics)
            yield _error(f"{stated} the metrics {dict(done.final_metrics)}, the last EVALUATE {evaluated}")
    expected = timeline.num_steps * samples_per_step
    if job.num_ranks == job.key.world_size and timeline.num_samples != expected:
        steps = f"{timeline.num_steps} steps of {samples_per_step} samples"
        yield _error(f"windows state {timeline.num_samples} samples for {steps}, which are {expected}")
    worlds = {end.started.world_size for end in timeline.ranks if end.started is not None}
    if worlds - {job.num_ranks}:
        yield _error(f"ranks report {', '.join(map(str, sorted(worlds)))} ranks, the job has {job.num_ranks}")


def _error(actual: str) -> Finding:
    return finding("error", "records-disagree", "", actual)


def _node_contradictions(job: JobSpec, node: NodeDir) -> Iterator[str]:
    stated: list[tuple[str, Any, Any]] = []
    if node.exit is not None:
        stated += [("exit.json", node.exit.host, node.exit.noderank)]
    task = read_json(node.path / "agent.json")
    if "host" in task:
        stated += [("agent.json", task["host"], task.get("noderank"))]
    for file, host, noderank in stated:
        # In the name of the directory, unusual characters are replaced.
        is_name = isinstance(host, str) and len(host) >= len(node.host)
        is_name = is_name and all(one == two or two == "-" for one, two in zip(host, node.host))
        if noderank != node.noderank or not is_name:
            yield f"{file} is of host {host}, noderank {noderank}"
    if node.exit is not None:
        per_host = job.ranks_per_host or job.key.nproc
        expected = set(range(node.noderank * per_host, (node.noderank + 1) * per_host))
        present = {rank for rank, _ in node.rank_logs()} | {rank.rank for rank in node.exit.ranks}
        for rank, log in node.rank_logs():
            seal, content = node.exit.logs.get(rank), log.read_bytes()
            if seal is None or LEFT_OUT.encode() in content:
                continue
            if LogSeal.of(content[: seal.num_bytes]) != seal or event_names(content[seal.num_bytes :]):
                yield f"{log.name} is not the log that rank {rank} left when it ended"
        if present - expected:
            yield f"has files of ranks {', '.join(map(str, sorted(present - expected)))}, which belong to other hosts"


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
    if node.exit is None:
        return
    try:
        began = datetime.fromisoformat(node.exit.started_at).timestamp()
    except ValueError:
        return
    if not began - _OFFSET_S <= wall <= began + node.exit.duration_s + _RECORDER_S:
        yield f"was not recorded in this round: it begins {wall - began:,.0f} s after the node agent's start"
