"""Read the log of a serving run: the server, the stages of the load, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from pydantic import ValidationError

from accelmark.results.read.rank_log import EndedStage, EventTimes, note_time, warning_text
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PerfLogReader, PerfLogRecord
from accelmark.spec.log.serving import LoadStage, ServeFinished, ServeStarted, TokenScenarioResult


@final
@dataclass(slots=True)
class ServeLog:
    """The events of the rank that loads the server. Times are monotonic milliseconds."""

    begin_ms: float | None = None
    last_ms: float = 0.0
    started: ServeStarted | None = None
    finished: ServeFinished | None = None
    stages: list[EndedStage] = field(default_factory=list)
    scenarios: list[TokenScenarioResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    times: EventTimes = field(default_factory=dict)
    malformed: int = 0
    """Malformed lines, and events whose value does not match the event's schema."""


def read_serve_log(path: Path) -> ServeLog:
    """Read the log of a serving run. Raises RunError when it cannot be read; malformed lines are counted."""
    reader = PerfLogReader(path)
    log = ServeLog()
    for record in reader:
        if record.event == Event.INIT_START:  # a new process loads the server from the beginning
            log = ServeLog(begin_ms=float(record.value.get("process_start_mono_ms", record.mono_ms)))
        if log.begin_ms is None:
            log.begin_ms = record.mono_ms
        log.last_ms = max(log.last_ms, record.mono_ms)
        note_time(log.times, record)
        try:
            _take(log, record)
        except (ValidationError, TypeError, ValueError):
            log.malformed += 1
    log.malformed += reader.report.malformed
    return log


def _take(log: ServeLog, record: PerfLogRecord) -> None:
    match record.event:
        case Event.INIT_END:
            log.started = record.value_as(ServeStarted)
        case Event.LOAD_END:
            log.stages.append(EndedStage(record.value_as(LoadStage), record.mono_ms / 1000))
        case Event.TOKEN_SCENARIO:
            log.scenarios.append(record.value_as(TokenScenarioResult))
        case Event.FINISHED:
            log.finished = record.value_as(ServeFinished)
        case Event.WARNING:
            log.warnings.append(warning_text(record.value))
