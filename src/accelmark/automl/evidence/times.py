"""Times against each other and against the beats that the coordinator wrote between them.

The journal is written in order: what stands between two beats happened between them. The coordinator's own times keep
to that closely. A worker's (an epoch's, a trial's end) are counted from when the worker began, which is a little after
the coordinator started it, and are heard of a little after they happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.journal import Beat, EpochDone, Event, Note, SessionBegan, SessionEnded, Tried
from accelmark.automl.engine.state import RunState
from accelmark.automl.records import FAILURES, EpochRecord, TrialRecord

CLOCK_SLACK_S: Final = 0.5
_HEARD_LATE_S: Final = 15.0
"""How much earlier than it is heard of a worker's event may be dated: a start that took long, a busy network."""
_RANKS_STARTED_S: Final = 600.0
"""The same where a trial has several ranks, which may have to be started anew with it."""
_CLOCKS_DIFFER: Final = 0.001
"""How much two hosts' clocks may drift apart, as a share of the time."""
_COMPUTING: Final = 1.1
"""Work that a device still had before it when an epoch's training ended counts as computing too."""


def against_clock(config: AutomlConfig, events: Sequence[Event], state: RunState) -> list[str]:
    """Hold all times against each other and against the beats."""
    late_s = _HEARD_LATE_S if config.training.devices_per_trial == 1 else _RANKS_STARTED_S
    found = [*_against_beats(events, late_s), *_overlaps(state.attempts.values())]
    epochs: dict[tuple[int, int], list[EpochRecord]] = {}
    for epoch in state.epochs:
        epochs.setdefault((epoch.trial, epoch.attempt), []).append(epoch)
    for key, record in state.attempts.items():
        found.extend(_trial(record, epochs.get(key, [])))
    return found


def _trial(record: TrialRecord, epochs: Sequence[EpochRecord]) -> list[str]:
    found: list[str] = []
    for epoch in epochs:
        where = f"trial {record.trial}, epoch {epoch.epoch}"
        if epoch.ended_s < epoch.begun_s or epoch.begun_s < record.started_s - CLOCK_SLACK_S:
            found.append(f"{where}: its times contradict each other")
        if epoch.training_s + epoch.evaluating_s > epoch.ended_s - epoch.begun_s + CLOCK_SLACK_S:
            found.append(f"{where}: worked longer than it lasted")
    for one, other in pairwise(epochs):
        if other.begun_s < one.ended_s - CLOCK_SLACK_S:
            found.append(f"trial {record.trial}: its epochs {one.epoch} and {other.epoch} overlap")
    if record.status in FAILURES or record.ended_s is None or not epochs:
        return found
    if record.ended_s < epochs[-1].ended_s + record.held_out_s - CLOCK_SLACK_S:
        found.append(f"trial {record.trial}: ended before its last epoch and its held-out evaluation did")
    trained_s = sum(epoch.training_s for epoch in epochs)
    if record.computing_s is not None and record.computing_s > trained_s * _COMPUTING + CLOCK_SLACK_S:
        found.append(
            f"trial {record.trial}: the driver computed for {record.computing_s:.1f} s in {trained_s:.1f} s of training"
        )
    return found


def _against_beats(events: Sequence[Event], late_s: float) -> list[str]:
    """Hold each time against what the coordinator wrote of its own clock before and after it."""
    found: list[str] = []
    clock_s = latest_s = 0.0
    started: set[tuple[int, int]] = set()
    for event, bound_s in zip(events, _clocks_after(events), strict=True):
        match event:
            case SessionBegan():
                if abs(event.clock_s - latest_s) > CLOCK_SLACK_S:
                    found.append(
                        f"a session began at {event.clock_s:.1f} s, where the run's clock stood at {latest_s:.1f} s"
                    )
                clock_s = event.clock_s
            case Beat() | Note() | SessionEnded():
                clock_s = max(clock_s, event.clock_s)
            case Tried(trial=record):
                where = f"trial {record.trial}, attempt {record.attempt}"
                if (record.trial, record.attempt) not in started:
                    started.add((record.trial, record.attempt))
                    found.extend(_outside(f"{where}: its start", record.started_s, clock_s, bound_s))
                    clock_s = max(clock_s, record.started_s)
                elif record.ended_s is not None:
                    slack_s = _CLOCKS_DIFFER * (record.ended_s - record.started_s)
                    # A worker that broke may not tell how long it worked.
                    earliest_s = 0.0 if record.status in FAILURES else clock_s - late_s - slack_s
                    found.extend(_outside(f"{where}: its end", record.ended_s, earliest_s, bound_s + slack_s))
            case EpochDone(epoch=epoch):
                where = f"trial {epoch.trial}, epoch {epoch.epoch}: its end"
                slack_s = _CLOCKS_DIFFER * epoch.ended_s
                found.extend(_outside(where, epoch.ended_s, clock_s - late_s - slack_s, bound_s + slack_s))
            case _:
                pass
        latest_s = max(latest_s, _time_of(event))
    return found


def _outside(what: str, time_s: float, earliest_s: float, latest_s: float) -> list[str]:
    if earliest_s - CLOCK_SLACK_S <= time_s <= latest_s + CLOCK_SLACK_S:
        return []
    return [
        f"{what} at {time_s:.1f} s is not between {earliest_s:.1f} and {latest_s:.1f} s, as the beats around it are"
    ]


def _clocks_after(events: Sequence[Event]) -> list[float]:
    """Return for each event the latest time at which it can have been written; infinite where a kill left it open.

    Of the next two clocks in its session one is later: a beat bears the time at which its step began, notes and ends
    the time at which they are written.
    """
    bounds: list[float] = []
    first_s = second_s = float("inf")
    for event in reversed(events):
        bounds.append(max(first_s, second_s))
        match event:
            case SessionBegan():
                first_s = second_s = float("inf")
            case SessionEnded():
                first_s = second_s = event.clock_s
            case Beat() | Note():
                first_s, second_s = event.clock_s, first_s
            case _:
                pass
    return bounds[::-1]


def _time_of(event: Event) -> float:
    match event:
        case Tried(trial=record):
            return record.started_s if record.ended_s is None else record.ended_s
        case EpochDone(epoch=epoch):
            return epoch.ended_s
        case SessionBegan() | Beat() | Note() | SessionEnded():
            return event.clock_s
        case _:
            return 0.0


def _overlaps(records: Iterable[TrialRecord]) -> list[str]:
    """Two trials on one worker at the same time would count the same accelerator twice."""
    found: list[str] = []
    by_worker: dict[int, list[TrialRecord]] = {}
    for record in records:
        by_worker.setdefault(record.worker, []).append(record)
    for ran in by_worker.values():
        ordered = sorted(ran, key=lambda record: record.started_s)
        for one, other in pairwise(ordered):
            if one.ended_s is not None and other.started_s < one.ended_s - CLOCK_SLACK_S:
                found.append(f"trials {one.trial} and {other.trial} ran on worker {one.worker} at the same time")
    return found
