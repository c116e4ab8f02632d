"""Read the logs of ranks: training with its attempts, inference with its steps, serving with its stages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from pydantic import ValidationError

from accelmark.spec.backports import zip_strict
from accelmark.spec.log import events, inference
from accelmark.spec.log.events import Compiled, Evaluation, Event, Finished, Started, StepWindow
from accelmark.spec.log.inference import LoadStage, ServeFinished, ServeStarted, TokenScenarioResult
from accelmark.spec.log.perflog import PerfLogReader, PerfLogRecord
from accelmark.spec.settings.inference import InferStep
from accelmark.spec.settings.training import Scalar

WARM_STEPS: Final = 5
"""First steps of each attempt whose time ranks are not compared by: they compile, and open libraries."""


class EventTime(NamedTuple):
    """When a rank logged an event, by two clocks of its host, in seconds."""

    mono_s: float
    wall_s: float


EventTimes = dict[str, tuple[EventTime, EventTime]]
"""Name of an event -> when it was first and last logged."""


def note_time(times: EventTimes, record: PerfLogRecord) -> None:
    """Add when an event was logged."""
    now = EventTime(record.mono_ms / 1e3, record.time_ms / 1e3)
    times[record.event] = times.get(record.event, (now, now))[0], now


class Windows(NamedTuple):
    """Columns with a number for each window of steps."""

    steps: array[float]
    """Optimizer steps done at its end, as ``samples``."""
    samples: array[float]
    end_ms: array[float]
    wall_ms: array[float]
    lengths: array[float]
    """Number of its steps."""
    num_losses: array[float]
    """Of all its steps, or of its last."""
    cpu_ms: array[float]
    """CPU time of the rank's process; NaN where it was not logged."""
    gc_ms: array[float]
    """Garbage collections while it was open."""
    retries: array[float]
    """Times that the device's allocator freed its cache."""


@dataclass
class Attempt:
    """One process of a rank; a resumed round has several in one log. Times are monotonic milliseconds."""

    begin_ms: float
    """Start of the process, or its first event."""
    last_ms: float
    train_start_ms: float | None = None
    train_end_ms: float | None = None
    windows: Windows = field(default_factory=lambda: Windows(*(array("d") for _ in Windows._fields)))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """Loss of each step, NaN where it is not finite."""
    step_ms: array[float] = field(default_factory=lambda: array("f"))
    """Each step with its wait for data; the mean of its window where the framework times windows only."""
    wait_ms: array[float] = field(default_factory=lambda: array("f"))
    saved_steps: set[int] = field(default_factory=set)
    """Optimizer steps after which a checkpoint was written."""
    init_cpu_s: float | None = None
    evaluations: list[tuple[float, Evaluation]] = field(default_factory=list)
    """With the monotonic time of the event."""
    times: EventTimes = field(default_factory=dict)

    @property
    def train_ms(self) -> float:
        """Raw training time; until the last event where there is no TRAIN_END."""
        if self.train_start_ms is None:
            return 0.0
        end = self.last_ms if self.train_end_ms is None else self.train_end_ms
        return max(end - self.train_start_ms, 0.0)

    @property
    def init_s(self) -> float | None:
        """Time from the first event until the process was ready to train."""
        start, end = (self.times.get(event) for event in (Event.INIT_START, Event.INIT_END))
        return None if start is None or end is None else end[0].mono_s - start[0].mono_s

    def loss_steps(self) -> Iterator[int]:
        """Yield the optimizer step (from 1) of each loss."""
        for end, count in zip_strict(self.windows.steps, self.windows.num_losses):
            yield from range(int(end) - int(count) + 1, int(end) + 1)

    @property
    def eval_s(self) -> float:
        """Seconds spent in evaluation."""
        return sum(evaluation.duration_s for _, evaluation in self.evaluations)


@dataclass
class RankEnd:
    """The parts of a rank's log that are not merged with other ranks."""

    rank: int
    started: Started | None = None
    finished: Finished | None = None
    compiled: Compiled | None = None
    warnings: list[str] = field(default_factory=list)
    bad_samples: list[str] = field(default_factory=list)
    """Errors of the training samples that others replaced."""
    malformed: int = 0
    """Malformed lines, and events whose value does not match the event's schema."""
    malformed_lines: tuple[int, ...] = ()
    truncated: bool = False


@dataclass
class OwnTime:
    """Sums over the steps of a rank, without the first of each attempt, in milliseconds."""

    num_steps: int = 0
    """Steps whose own part is known: all, or those that were traced."""
    step_ms: float = 0.0
    """Of these steps, without the wait for data."""
    own_ms: float = 0.0
    """The rank's own computation in these steps, without data and other ranks."""
    num_waits: int = 0
    data_wait_ms: float = 0.0
    """Of all steps."""
    longest_ms: float = 0.0
    """The longest own part, or wait for data, of one step."""


@dataclass
class TrainLog:
    """The data of one rank that figures are computed from."""

    end: RankEnd
    attempts: list[Attempt] = field(default_factory=list)
    step_ms: array[float] = field(default_factory=lambda: array("f"))
    """Computation of each step of all attempts; single precision halves the memory of long runs."""
    compute_ms: float = 0.0
    data_wait_ms: float = 0.0
    marked_wall_s: float = 0.0
    """Duration, by the host's clock, of the windows that have marks of the step clock."""
    marked_span_s: float = 0.0
    """From the first to the last mark of these windows, by the clock of the steps."""
    first_wait_s: float = 0.0
    """Waits for the data of their first steps, which precede the first mark."""
    own: OwnTime = field(default_factory=OwnTime)

    @property
    def has_windows(self) -> bool:
        """Whether the rank logged windows of steps."""
        return any(attempt.windows.steps for attempt in self.attempts)


def read_train_log(path: Path, rank: int) -> TrainLog:
    """Read one rank's log, including the earlier attempts that its last attempt continued."""
    log = TrainLog(RankEnd(rank))
    for source in logs_of_attempts(path):
        reader, end = PerfLogReader(source), RankEnd(rank)
        log, first = replace(log, end=end), len(log.attempts)
        for record in reader:
            if len(log.attempts) == first or (
                record.event == Event.INIT_START
                and (bool(log.end.started or log.end.finished) or log.attempts[-1].train_start_ms is not None)
            ):
                begin = record.value.get("process_start_mono_ms", record.mono_ms)
                log.attempts.append(Attempt(float(begin), record.mono_ms))
                end.finished = None
            if first and record.event == Event.TRAIN_START and not record.value.get("resumed"):  # from the beginning
                log, first = TrainLog(end, log.attempts[first:]), 0
            attempt = log.attempts[-1]
            attempt.last_ms = max(attempt.last_ms, record.mono_ms)
            note_time(attempt.times, record)
            try:
                _add(log, attempt, record)
            except (ValidationError, TypeError, ValueError):
                end.malformed += 1
        end.malformed += reader.malformed
        end.malformed_lines, end.truncated = reader.malformed_lines, reader.truncated
    return log


def logs_of_attempts(path: Path) -> list[Path]:
    """Return the logs of a rank in ``attempt<N>/`` of its round, where ``resume`` has moved them, and then its own."""
    logs = path.parent.parent.glob(f"attempt*/*/{path.name}")
    return [*sorted(logs, key=lambda log: int(log.parent.parent.name.removeprefix("attempt"))), path]


def _add(log: TrainLog, attempt: Attempt, record: PerfLogRecord) -> None:
    event = record.event
    if event == Event.STEP_END:
        _add_window(log, attempt, record.value_as(StepWindow), record.mono_ms)
    elif event == Event.STEP_TRACED:
        traced = record.value_as(events.TracedStep)
        log.own.num_steps += 1
        log.own.step_ms += traced.step_ms
        log.own.own_ms += traced.own_ms
        log.own.longest_ms = max(log.own.longest_ms, traced.own_ms)
    elif event == Event.EVALUATE:
        attempt.evaluations.append((record.mono_ms, record.value_as(Evaluation)))
    elif event == Event.CHECKPOINT:
        attempt.saved_steps.add(record.value_as(events.SavedCheckpoint).global_steps)
    elif event == Event.TRAIN_START:
        attempt.train_start_ms = record.mono_ms
    elif event == Event.TRAIN_END:
        attempt.train_end_ms = record.mono_ms
    elif event == Event.INIT_END:
        log.end.started = record.value_as(Started)
        attempt.init_cpu_s = log.end.started.init_cpu_s
    elif event == Event.FINISHED:
        log.end.finished = record.value_as(Finished)
    elif event == Event.COMPILED:
        log.end.compiled = record.value_as(Compiled)
    elif event == Event.WARNING:
        log.end.warnings.append(warning_text(record.value))
    elif event == Event.BAD_SAMPLE:
        log.end.bad_samples.append(str(record.value.get("message", dict(record.value))))


def _add_window(log: TrainLog, attempt: Attempt, window: StepWindow, mono_ms: float) -> None:
    log.step_ms.extend(window.step_ms)
    log.compute_ms += sum(window.step_ms)
    log.data_wait_ms += sum(window.data_wait_ms)
    skipped = max(0, WARM_STEPS - int(sum(attempt.windows.lengths[:WARM_STEPS])))
    waits, own_ms = window.data_wait_ms[skipped:], window.own_ms[skipped:]
    log.own.num_waits += len(waits)
    log.own.data_wait_ms += sum(waits)
    if window.own_ms:
        log.own.num_steps += len(own_ms)
        log.own.step_ms += sum(window.step_ms[skipped:])
        log.own.own_ms += sum(own_ms)
    log.own.longest_ms = max([log.own.longest_ms, *waits, *own_ms])
    if window.span_ms is not None:
        log.marked_wall_s += window.wall_ms / 1e3
        log.marked_span_s += window.span_ms / 1e3
        log.first_wait_s += sum(window.data_wait_ms[:1]) / 1e3
    count = window.num_steps or len(window.losses)
    steps = [sum(parts) for parts in zip_longest(window.step_ms, window.data_wait_ms, fillvalue=0.0)]
    attempt.wait_ms.extend([*window.data_wait_ms, *[0.0] * count][:count])
    attempt.step_ms.extend(steps if window.step_ms else [window.wall_ms / count] * count)
    attempt.losses.extend([math.nan if loss is None else loss for loss in window.losses])
    cpu_ms = math.nan if window.cpu_ms is None else window.cpu_ms
    ended = (window.global_steps, window.num_trained_samples, mono_ms, window.wall_ms, count, len(window.losses))
    for column, number in zip_strict(attempt.windows, (*ended, cpu_ms, window.gc_ms, window.alloc_retries)):
        column.append(number)


class EndedStage(NamedTuple):
    """A stage of the load, and when its event was written, in seconds of the monotonic clock."""

    load: LoadStage
    mono_s: float


@dataclass
class ProcessLog:
    """What the logs of inference and serving have in common. Times are monotonic milliseconds."""

    events: ClassVar[Mapping[str, tuple[str, type[Any]]]] = {}
    """Event -> attribute that its value is assigned or appended to, or kept in by its phase, and its type."""
    begin_ms: float | None = None
    last_ms: float = 0.0
    times: EventTimes = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    malformed: int = 0
    """Malformed lines, and events whose value does not match the event's schema."""

    def add(self, record: PerfLogRecord) -> None:
        """Add an event. Raises ValidationError where its value does not match its schema."""
        if record.event in self.events:
            name, model = self.events[record.event]
            value, held = record.value_as(model), getattr(self, name)
            if isinstance(held, dict):
                held[value.phase] = value
            elif isinstance(held, list):
                held.append(EndedStage(value, record.mono_ms / 1000) if isinstance(value, LoadStage) else value)
            else:
                setattr(self, name, value)
        elif record.event == Event.WARNING:
            self.warnings.append(warning_text(record.value))


@dataclass
class InferLog(ProcessLog):
    """The data of the rank of an inference that figures are computed from."""

    events: ClassVar[Mapping[str, tuple[str, type[Any]]]] = {
        Event.INIT_END: ("started", inference.InferStarted), Event.STAGE_END: ("stages", inference.StageEnd),
        Event.REPEAT_CHECK: ("repeat_check", inference.RepeatCheck), Event.LOAD_END: ("loads", LoadStage),
        Event.ANSWER_CHECK: ("answers", inference.AnswerCheck), Event.FINISHED: ("finished", inference.InferFinished),
        Event.SCENARIO: ("scenarios", inference.ScenarioResult), Event.WARMUP: ("warm_ups", inference.WarmUp),
        Event.EVALUATE: ("evaluations", inference.InferEvaluation),
        Event.TOKEN_SCENARIO: ("token_scenarios", TokenScenarioResult),
    }  # fmt: skip
    started: inference.InferStarted | None = None
    finished: inference.InferFinished | None = None
    stages: list[inference.StageEnd] = field(default_factory=list)
    warm_ups: dict[inference.Phase, inference.WarmUp] = field(default_factory=dict)
    windows: dict[inference.Phase, list[inference.ForwardWindow]] = field(default_factory=dict)
    spans_ms: dict[inference.Phase, tuple[float, float]] = field(default_factory=dict)
    """From the start of a phase's first window to the end of its last."""
    evaluations: dict[inference.Phase, inference.InferEvaluation] = field(default_factory=dict)
    repeat_check: inference.RepeatCheck | None = None
    answers: inference.AnswerCheck | None = None
    scenarios: list[inference.ScenarioResult] = field(default_factory=list)
    token_scenarios: list[TokenScenarioResult] = field(default_factory=list)
    loads: list[EndedStage] = field(default_factory=list)

    def add(self, record: PerfLogRecord) -> None:
        """Add an event; windows are kept by phase, with their times."""
        if record.event == Event.FORWARD:
            window = record.value_as(inference.ForwardWindow)
            self.windows.setdefault(window.phase, []).append(window)
            opened_ms, _ = self.spans_ms.get(window.phase, (record.mono_ms - window.wall_ms, 0.0))
            self.spans_ms[window.phase] = (opened_ms, record.mono_ms)
        else:
            ProcessLog.add(self, record)

    def stage(self, step: InferStep) -> inference.StageEnd | None:
        """Return the end of a step, None where it did not end."""
        return next((stage for stage in self.stages if stage.step is step), None)

    def created(self, detail: str) -> Scalar | None:
        """Return a detail that the step CREATE reported, None where it did not."""
        stage = self.stage(InferStep.CREATE)
        return stage.details.get(detail) if stage is not None else None


@dataclass
class ServeLog(ProcessLog):
    """The events of the rank that loads the server."""

    events: ClassVar[Mapping[str, tuple[str, type[Any]]]] = {
        Event.INIT_END: ("started", ServeStarted), Event.LOAD_END: ("stages", LoadStage),
        Event.TOKEN_SCENARIO: ("scenarios", TokenScenarioResult), Event.FINISHED: ("finished", ServeFinished),
    }  # fmt: skip
    started: ServeStarted | None = None
    finished: ServeFinished | None = None
    stages: list[EndedStage] = field(default_factory=list)
    scenarios: list[TokenScenarioResult] = field(default_factory=list)


L = TypeVar("L", bound=ProcessLog)


def read_log(path: Path, kind: type[L]) -> L:
    """Read the log of an inference or serving run. Raises RunError when it cannot be read.

    A process that starts again starts from the beginning: it has no checkpoints.
    """
    reader, log = PerfLogReader(path), kind()
    for record in reader:
        if record.event == Event.INIT_START:
            log = kind(begin_ms=float(record.value.get("process_start_mono_ms", record.mono_ms)))
        if log.begin_ms is None:
            log.begin_ms = record.mono_ms
        log.last_ms = max(log.last_ms, record.mono_ms)
        note_time(log.times, record)
        try:
            log.add(record)
        except (ValidationError, TypeError, ValueError):
            log.malformed += 1
    log.malformed += reader.malformed
    return log


def warning_text(value: Mapping[str, Any]) -> str:
    """Return the text of a WARNING event."""
    if "what" in value:
        return f"{value.get('where')}: {value.get('key')}: {value['what']}"
    return str(value.get("message", dict(value)))
