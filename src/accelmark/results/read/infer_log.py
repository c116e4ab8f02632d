"""Read the log of an inference run: its steps, windows, accuracies, checks and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from pydantic import ValidationError

from accelmark.spec.events import (
    Event,
    ForwardWindow,
    InferEvaluation,
    InferFinished,
    InferStarted,
    Phase,
    RepeatCheck,
    ScenarioResult,
    StageEnd,
    WarmUp,
)
from accelmark.spec.inference import InferStep
from accelmark.spec.perflog import PerfLogReader, PerfLogRecord
from accelmark.spec.settings import Scalar


@final
@dataclass(slots=True)
class InferLog:
    """The data of the rank that figures are computed from. Times are monotonic milliseconds."""

    begin_ms: float | None = None
    last_ms: float = 0.0
    started: InferStarted | None = None
    finished: InferFinished | None = None
    stages: list[StageEnd] = field(default_factory=list)
    warm_ups: dict[Phase, WarmUp] = field(default_factory=dict)
    windows: dict[Phase, list[ForwardWindow]] = field(default_factory=dict)
    spans_ms: dict[Phase, tuple[float, float]] = field(default_factory=dict)
    """From the start of a phase's first window to the end of its last."""
    evaluations: dict[Phase, InferEvaluation] = field(default_factory=dict)
    repeat_check: RepeatCheck | None = None
    scenarios: list[ScenarioResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    malformed: int = 0
    """Malformed lines, and events whose value does not match the event's schema."""

    def stage(self, step: InferStep) -> StageEnd | None:
        """Return the end of a step, None where it did not end."""
        return next((stage for stage in self.stages if stage.step is step), None)

    def created(self, detail: str) -> Scalar | None:
        """Return a detail that the step CREATE reported, None where it did not."""
        stage = self.stage(InferStep.CREATE)
        return stage.details.get(detail) if stage is not None else None


def read_infer_log(path: Path) -> InferLog:
    """Read the log of an inference run. Raises RunError when it cannot be read; malformed lines are counted."""
    reader = PerfLogReader(path)
    log = InferLog()
    for record in reader:
        if record.event == Event.INIT_START:  # a new process starts from the beginning: inference has no checkpoints
            log = InferLog(begin_ms=float(record.value.get("process_start_mono_ms", record.mono_ms)))
        if log.begin_ms is None:
            log.begin_ms = record.mono_ms
        log.last_ms = max(log.last_ms, record.mono_ms)
        try:
            _take(log, record)
        except (ValidationError, TypeError, ValueError):
            log.malformed += 1
    log.malformed += reader.report.malformed
    return log


def _take(log: InferLog, record: PerfLogRecord) -> None:
    match record.event:
        case Event.INIT_END:
            log.started = record.value_as(InferStarted)
        case Event.STAGE_END:
            log.stages.append(record.value_as(StageEnd))
        case Event.WARMUP:
            warm_up = record.value_as(WarmUp)
            log.warm_ups[warm_up.phase] = warm_up
        case Event.FORWARD:
            window = record.value_as(ForwardWindow)
            log.windows.setdefault(window.phase, []).append(window)
            opened_ms, _ = log.spans_ms.get(window.phase, (record.mono_ms - window.wall_ms, 0.0))
            log.spans_ms[window.phase] = (opened_ms, record.mono_ms)
        case Event.EVALUATE:
            evaluation = record.value_as(InferEvaluation)
            log.evaluations[evaluation.phase] = evaluation
        case Event.REPEAT_CHECK:
            log.repeat_check = record.value_as(RepeatCheck)
        case Event.SCENARIO:
            log.scenarios.append(record.value_as(ScenarioResult))
        case Event.FINISHED:
            log.finished = record.value_as(InferFinished)
        case Event.WARNING:
            log.warnings.append(_warning(record.value))


def _warning(value: Mapping[str, Any]) -> str:
    if "what" in value:
        return f"{value.get('where')}: {value.get('key')}: {value['what']}"
    return str(value.get("message", dict(value)))
