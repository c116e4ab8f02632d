"""Compare the clocks of a round: of ranks, node agents and coordinator, wall and monotonic, and the kernel's uptime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from accelmark.results.figures.timeline import Timeline
from accelmark.results.read.rank_log import EventTime, EventTimes, MarkedTime
from accelmark.results.read.round_dir import NodeDir, ledger_events
from accelmark.results.schema import Finding, finding
from accelmark.spec.clocks import ClockReading, HostClocks
from accelmark.spec.number_format import limit_percent

MAX_DIFFERENCE: Final = 0.01
"""Largest relative difference of two clocks over the same span."""
_DELAY_S: Final = 1.0
"""Further difference allowed: on a busy machine a process may be interrupted between two readings, and sees what
another one did later than it happened."""
_LATE_S: Final = 5.0
"""... by which the agent may see less time than the rank logged, because it saw the beginning late."""
_LAUNCH_S: Final = 120.0
"""... of the coordinator's span beyond the agent's, which includes its start and the copying of its last files."""
_MAX_BETWEEN_MARKS: Final = 0.2
"""Largest share of the windows' time outside of the marks of their steps, except waits for data."""
_MIN_BETWEEN_MARKS_S: Final = 1.0
_RULE: Final = "clocks-agree"
_SPANS: Final = (("TRAIN_START", "TRAIN_END"), ("FORWARD", "FORWARD"), ("INIT_START", "FINISHED"))
"""Pairs of events between which clocks are compared: from the first's first to the second's last occurrence."""


def clock_findings(
    round_dir: Path, nodes: Iterable[NodeDir], times: Mapping[str, EventTimes], *, is_translated: bool
) -> Iterator[Finding]:
    """Yield errors about clocks that are more than 1 % apart; clocks that the run did not record are not compared.

    ``times`` has the events of the first rank of each node directory. Those of training are not compared with the
    agent's where they are translated from a trainer's output (``is_translated``): they are logged later than they were.
    """
    found: list[str] = []
    for node in nodes:
        own = times.get(str(node.path), {})
        found += _of_rank(f"{node.host}: the rank", own)
        clocks = node.exit.clocks if node.exit is not None else None
        if clocks is not None:
            found += _of_agent(f"{node.host}: the agent", clocks)
            found += _seen(node.host, own, clocks, is_translated=is_translated)
        if node.exit is not None:
            found += _of_coordinator(round_dir, node.host, node.exit.duration_s)
    yield from (
        finding("error", _RULE, f"at most {limit_percent(MAX_DIFFERENCE)} apart", what) for what in dict.fromkeys(found)
    )


def step_clock_findings(timeline: Timeline, device_type: str) -> Iterator[Finding]:
    """Yield an error where the clock of the steps and the clock of the windows do not agree on the time of training."""
    marked: MarkedTime = timeline.marked
    outside_s = marked.wall_s - marked.span_s - marked.first_wait_s
    allowed_s = _MAX_BETWEEN_MARKS * marked.wall_s + _MIN_BETWEEN_MARKS_S
    if marked.span_s > marked.wall_s * (1 + MAX_DIFFERENCE) + _DELAY_S or outside_s > allowed_s:
        actual = f"windows of steps lasted {marked.wall_s:.2f} s, {marked.span_s:.2f} s by the clock that times steps"
        yield finding("error", _RULE, "the marks of steps cover their windows", actual)
        return
    # On the host, nothing but the loop's own work lies between two steps. A device may wait for its host there.
    between_s = marked.span_s + marked.first_wait_s - timeline.compute_s - timeline.data_wait_s
    if device_type == "cpu" and len(timeline.ranks) == 1 and between_s > allowed_s:
        actual = (
            f"{timeline.compute_s:.2f} s of computation and {timeline.data_wait_s:.2f} s of waiting for data were "
            f"reported for {marked.span_s:.2f} s of steps"
        )
        yield finding("error", _RULE, "steps and waits add up to their windows", actual)


def _differ(one_s: float, two_s: float) -> bool:
    return abs(one_s - two_s) > MAX_DIFFERENCE * max(one_s, two_s) + _DELAY_S


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


def _seen(host: str, times: EventTimes, clocks: HostClocks, *, is_translated: bool) -> Iterator[str]:
    for begin, end, first, last in _spans(times):
        if is_translated and begin == "TRAIN_START":
            continue
        if begin in clocks.seen and end in clocks.seen:
            logged_s = last.mono_s - first.mono_s
            seen_s = clocks.seen[end][1].mono_s - clocks.seen[begin][0].mono_s
            if _differ(logged_s, seen_s) and not 0 < logged_s - seen_s <= MAX_DIFFERENCE * logged_s + _LATE_S:
                clocks_s = f"{logged_s:.2f} s by the rank's clock, {seen_s:.2f} s by the agent's"
                yield f"{host}: from {begin} to {end} {clocks_s}"


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
    return last - first if isinstance(first, int | float) and isinstance(last, int | float) else None
