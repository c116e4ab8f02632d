"""Displays of a run: live on a terminal, plain lines elsewhere, JSON lines for programs; the progress that they show.

The progress of a running job is read from the log of rank 0 and from telemetry.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, Self, get_args

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.figures import FigureName, format_figure
from accelmark.results.read.rank_log import warning_text
from accelmark.results.schema import JobState, RoundResult
from accelmark.run.record.states import JobStatus, utc_now
from accelmark.spec.job import InferJob, ServeJob, TrainingWork, Work
from accelmark.spec.log.events import Evaluation, Event, StepWindow
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, InferEvaluation, LoadPhase, LoadProgress, Phase
from accelmark.spec.log.perflog import PerfLogRecord, decode_line
from accelmark.spec.model import json_objects
from accelmark.spec.number_format import counted, digits, duration, percent, quantity, subtracted
from accelmark.spec.settings.inference import InferStep

_PHASES: Final[Mapping[str, str]] = {
    Event.INIT_START: "initialising",
    Event.INIT_EVALUATION: "evaluating",
    Event.FINISHED: "finished",
}
_STEPS: Final[Mapping[str, str]] = {
    InferStep.INITIALISE: "initialising",
    InferStep.CREATE: "creating",
    InferStep.VALIDATE: "validating",
    InferStep.EXPORT: "exporting",
    InferStep.COMPILE: "compiling",
    InferStep.INFER: "inferring",
    InferStep.SUMMARISE: "summarising",
}
_INPUTS: Final[Mapping[Phase, str]] = {
    "validation": " (framework, data as published)",
    "inference": " (engine, all passes)",
}
"""What computes a metric of inference, and over which inputs, in the words of the figures' titles."""
_BEGUN: Final[Mapping[str, Any]] = {"samples": 0, "throughput": None, "share": None, "eta_s": None}
"""Progress at the beginning of a step of inference, and after its passes."""
_WINDOWS_OF_RATE: Final = 10
_MOST_BYTES: Final = 4 * 2**20
"""Bytes read at once; a longer backlog takes several reads."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The last telemetry sample of rank 0's host; null where a value cannot be read."""

    utilisation: float | None = None
    """Mean over the devices, 0 to 1; null where these are the host's processors."""
    power_w: float | None = None
    """Sum over the devices, or of the host where devices have none."""
    memory_used_mib: float | None = None
    cpu: float | None = None
    """Utilisation of the host's processors, 0 to 1."""
    rank_memory_mib: float | None = None
    """Resident memory of the host's ranks."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job at one time."""

    phase: str = "starting"
    step: int = 0
    total_steps: int | None = None
    """null while the settings imply no limit in steps."""
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    metric: tuple[str, float] | None = None
    """The metric of the target or of the inference at the last evaluation, or the first metric of that evaluation. The
    names of inference say what computed it, over which inputs, except where ``framework_metric`` is known."""
    framework_metric: float | None = None
    """The same metric of the framework over the same inputs as the engine's."""
    throughput: float | None = None
    """Units per second over the last windows, all ranks."""
    elapsed_s: float = 0.0
    """Raw training time as of the last event."""
    eta_s: float | None = None
    """Time to the limit (steps, samples or time) reached first at this rate, or to the end of the engine's passes or
    of the load; a target may be reached earlier."""
    share: float | None = None
    """Completed share of that limit, 0 to 1."""
    devices: DeviceLoad = DeviceLoad()
    warnings: tuple[str, ...] = ()

    @property
    def metric_text(self) -> str:
        """The value of ``metric``, with the framework's where that is over the same inputs; empty without a metric."""
        return "" if self.metric is None else metric_text(self.metric[1], self.framework_metric)


def metric_text(metric: float, framework: float | None) -> str:
    """Return a metric and, where it is known, the framework's over the same inputs, so that they can be subtracted."""
    if framework is None:
        return digits(metric)
    engine, other, _ = subtracted(metric, framework)
    return f"{engine}, framework {other} on the same inputs"


class Tail:
    """Reads complete lines appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def lines(self) -> list[str]:
        """Return the lines completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [line.decode("utf-8", errors="backslashreplace") for line in whole]


class ProgressReader:
    """Follows one job; each :meth:`read` reads only what was appended.

    Args:
        node_dir: where the files of rank 0's host are.
    """

    def __init__(self, node_dir: Path, work: Work) -> None:
        self._work = work
        self._rank_log = Tail(node_dir / "rank0.out.log")
        self._telemetry = Tail(node_dir / "telemetry.jsonl")
        self._devices_are_cpus = False
        self._now = JobProgress()
        self._total_steps: int | None = None
        """As rank 0 reports it when training starts."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOWS_OF_RATE)
        """Samples or items of the last windows, and their durations in seconds."""

    def read(self) -> JobProgress:
        """Return the current progress."""
        for event in chain.from_iterable(map(decode_line, self._rank_log.lines())):
            with contextlib.suppress(ValidationError):
                self._now = replace(self._now, **self._changes(event))
        devices = self._now.devices
        for line in json_objects(self._telemetry.lines()):
            if isinstance(line.get("header"), dict):
                self._devices_are_cpus = bool(line["header"].get("devices_are_cpus"))
            elif isinstance(line.get("host"), dict):
                devices = _devices(line, are_cpus=self._devices_are_cpus)
        self._now = replace(self._now, devices=devices, **self._estimates())
        return self._now

    def _changes(self, event: PerfLogRecord) -> dict[str, Any]:
        """Return what an event changes. Raises ValidationError where it is not as AccelMark writes it."""
        now, value, work = self._now, event.value, self._work

        def metric_of(metrics: Mapping[str, float | None], inputs: str = "") -> dict[str, Any]:
            target = work.target if isinstance(work, TrainingWork) else None
            wanted = work.metric if isinstance(work, InferJob) else target.metric if target is not None else None
            numbers = {name: number for name, number in metrics.items() if number is not None}
            name = wanted if wanted in numbers else next(iter(numbers), None)
            return {"metric": (f"{name}{inputs}", numbers[name]), "framework_metric": None} if name is not None else {}

        match event.event:
            case Event.STEP_END:
                window = event.value_as(StepWindow)
                num_steps = len(window.losses) if window.num_steps is None else window.num_steps
                # A resumed round has a new log, in which samples before its checkpoint are counted, too.
                rate = self._rate(window.num_trained_samples * num_steps / window.global_steps, window.wall_ms)
                return {
                    "phase": "training",
                    "step": window.global_steps,
                    "epoch": window.epoch,
                    "samples": window.num_trained_samples,
                    "loss": window.loss,
                    "throughput": rate * work.units_per_sample if rate is not None else None,
                    "elapsed_s": now.elapsed_s + window.wall_ms / 1000,
                }
            case Event.TRAIN_START:
                total = value.get("total_steps")
                self._total_steps = total if isinstance(total, int) else None
                return {"phase": "first steps"}  # a framework that compiles does so in them
            case Event.EVALUATE if "phase" in value:
                evaluated = event.value_as(InferEvaluation)
                return {**_BEGUN, **metric_of(evaluated.metrics, _INPUTS[evaluated.phase])}
            case Event.ANSWER_CHECK:
                answers = event.value_as(AnswerCheck)
                shown = metric_of(answers.engine_metrics)
                if shown:
                    shown["framework_metric"] = answers.framework_metrics.get(shown["metric"][0])
                return shown
            case Event.EVALUATE:
                evaluation = event.value_as(Evaluation)
                return {"phase": "training", "elapsed_s": evaluation.elapsed_s, **metric_of(evaluation.metrics)}
            case Event.STAGE_BEGIN if str(value.get("step")) in _STEPS:
                self._recent.clear()
                return {**_BEGUN, "phase": _STEPS[str(value["step"])]}
            case Event.FORWARD:
                forward = event.value_as(ForwardWindow)
                items, rate = sum(forward.items), self._rate(sum(forward.items), forward.wall_ms)
                changes: dict[str, Any] = {"samples": now.samples + items, "throughput": rate}
                if forward.planned_items and rate:
                    left = max(0, forward.planned_items - now.samples - items)
                    changes |= {"share": 1 - left / forward.planned_items, "eta_s": left / rate}
                return changes
            case Event.HEARTBEAT if "phase" in value:
                load = event.value_as(LoadProgress)
                return {"phase": load.phase, "samples": load.num_requests, "share": load.share, "eta_s": load.eta_s}
            case Event.WARNING | Event.BAD_SAMPLE:
                return {"warnings": (*now.warnings, warning_text(value))}
            case name if name in _PHASES:
                return {"phase": _PHASES[name]}
        return {}

    def _rate(self, num_items: float, wall_ms: float) -> float | None:
        """Add a window, and return the samples or items per second over the last windows."""
        self._recent.append((num_items, wall_ms / 1000))
        seconds = sum(wall_s for _, wall_s in self._recent)
        return sum(count for count, _ in self._recent) / seconds if seconds > 0 else None

    def _estimates(self) -> dict[str, Any]:
        """Return completed share and remaining time, from the limit that is reached first at this rate."""
        now = self._now
        if now.phase == "finished":
            return {"eta_s": None, "share": None}
        if not isinstance(self._work, TrainingWork) or now.step == 0:
            return {}
        end = self._work.settings.end
        total = self._total_steps if self._total_steps is not None else end.max_steps
        left: list[tuple[float, float]] = []
        rate = now.throughput / self._work.units_per_sample if now.throughput else None
        if total is not None and rate:
            samples_left = max(0, total - now.step) * now.samples / now.step
            left.append((samples_left / rate, min(1.0, now.step / total)))
        if end.max_duration_s is not None:
            left.append((max(0.0, end.max_duration_s - now.elapsed_s), min(1.0, now.elapsed_s / end.max_duration_s)))
        eta_s, share = min(left, default=(None, None))
        return {"total_steps": total, "eta_s": eta_s, "share": share}


def _devices(sample: dict[str, Any], *, are_cpus: bool) -> DeviceLoad:
    devices = [device for device in sample.get("devices") or [] if isinstance(device, dict)]
    utilisation, power, memory = (
        [float(device[name]) for device in devices if isinstance(device.get(name), (int, float))]
        for name in ("utilisation", "power_w", "memory_used_mib")
    )
    host = {name: value for name, value in sample["host"].items() if isinstance(value, (int, float))}
    return DeviceLoad(
        utilisation=sum(utilisation) / len(utilisation) if utilisation and not are_cpus else None,
        power_w=sum(power) if power else host.get("power_w"),
        memory_used_mib=sum(memory) if memory else None,
        cpu=host.get("cpu"),
        rank_memory_mib=host.get("rank_rss_mib"),
    )


SIGNS: Final[Mapping[JobState, tuple[str, str]]] = {
    "queued": ("○", "dim"),
    "preparing": ("◌", "cyan"),
    "running": ("●", "bold cyan"),
    "succeeded": ("■", "dim"),  # a tick is for a verdict
    "failed": ("✗", "red"),
    "timed_out": ("✗", "red"),
    "lost": ("?", "magenta"),
    "cancelled": ("–", "yellow"),
}
_MOST_ENDED: Final = 6
_MOST_QUEUED: Final = 4
_MOST_LOSSES: Final = 4096
_MOST_BLOCKS: Final = 24
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_NARROWEST: Final = 16
"""Least columns for a job's result, however narrow the terminal is."""
_PLAIN_EVERY_S: Final = 10.0
_DRAWN_EVERY_S: Final = 0.25

_HEADLINES: Final = (
    FigureName.FINAL_METRIC, FigureName.THROUGHPUT_STEADY, FigureName.RAW_TRAIN_TIME, FigureName.INFERENCE_CORE,
    FigureName.ENGINE_METRIC, FigureName.LATENCY_P50, FigureName.OUTPUT_RATE, FigureName.TTFT_P50,
    FigureName.TPOT_P50, FigureName.MFU,
)  # fmt: skip


class RunObserver:
    """Receives the progress of a run; this class ignores it, displays override its methods."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Report that a job changed its state."""

    def planned(self, plan: Plan) -> None:
        """Report that a search has added jobs to the plan."""

    def checking(self, what: str) -> None:
        """Report that hosts are being checked before a start; ``what`` is empty at the end."""

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Report a step of preparing a job (a download, say); up to ten times a second."""

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        """Report the progress of a running job; about once a second."""

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Report the result of a round."""

    def note(self, text: str) -> None:
        """Report anything else that the user has to know."""


def display(plan: Plan, run: str, statuses: Mapping[str, JobStatus], *, as_json: bool) -> RunObserver:
    """Return the display of a run on standard output."""
    if as_json:
        return _JsonDisplay(run)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    on_terminal = console.is_terminal and not console.is_dumb_terminal
    return _LiveDisplay(plan, dict(statuses)) if on_terminal else _PlainDisplay(console)


def headline(result: RoundResult) -> str:
    """Return the result of a round in one line: converged or not, metric, throughput, time, MFU."""
    parts = []
    if result.converged is not None:
        parts.append("converged" if result.converged else "not converged")
    for name in _HEADLINES:
        figure = result.figures.get(name)
        if figure is None or figure.value is None:
            continue
        if name is FigureName.FINAL_METRIC:
            parts.append(f"{result.metric_title} {digits(figure.value)}")
        elif name is FigureName.ENGINE_METRIC:
            shown = metric_text(figure.value, result.value_of(FigureName.FRAMEWORK_METRIC))
            parts.append(f"{result.metric_title} {shown}")
        else:
            shown = format_figure(name, figure.value, result.unit)
            parts.append(f"{name.info.title} {shown}" if name.info.unit in ("ratio", "ms") else shown)
    return ", ".join(parts)


class _LiveDisplay(RunObserver):
    """Draws a few lines at the bottom of a terminal, about once a second."""

    def __init__(self, plan: Plan, statuses: dict[str, JobStatus]) -> None:
        self._board = Board(plan, statuses)
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._since = time.monotonic()
        self._drawn = float("-inf")

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._board.is_over = True
        self._draw()
        self._live.stop()

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        self._board.statuses[job.directory] = status
        if status.state in ("preparing", "running"):
            self._since = time.monotonic()
            self._board.progress, self._board.losses, self._board.preparing = JobProgress(), [], ""
            self._board.headlines.pop(job.directory, None)  # of an earlier attempt
        self._draw()

    def planned(self, plan: Plan) -> None:
        for job in plan.jobs:
            self._board.statuses.setdefault(job.directory, JobStatus())
        self._board.plan = plan

    def checking(self, what: str) -> None:
        self._board.checking = what
        self._draw()

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Draw the step, at most a few times a second; after a job has run, with the time of the step."""
        status = self._board.statuses[job.directory]
        if not self._board.preparing and status.state != "preparing":
            self._since = time.monotonic()
        self._board.preparing = what
        if status.ended:  # resumed to check its weights
            self._board.checking = f"{job_name(job)}: {what}, {duration(time.monotonic() - self._since)}"
        if time.monotonic() - self._drawn > _DRAWN_EVERY_S:
            self._draw()

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        if progress.loss is not None and progress.step != self._board.progress.step:
            self._board.losses = [*self._board.losses[1 - _MOST_LOSSES :], progress.loss]
        self._board.progress, self._board.preparing = progress, ""
        self._draw()

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        self._board.headlines[job.directory], self._board.checking = headline(result), ""
        self._draw()

    def note(self, text: str) -> None:
        self._board.notes.append(text)
        self._draw()

    def _draw(self) -> None:
        self._board.seconds = time.monotonic() - self._since
        self._drawn = time.monotonic()
        # One column is left free: what the terminal echoes (^C) behind a full line would begin a new one.
        self._live.update(draw(self._board, self._console.width - 1), refresh=True)


class _PlainDisplay(RunObserver):
    """Prints a line for each change of state, and while a job runs about every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        self._last = time.monotonic()
        reason = f": {status.reason}" if status.reason else ""
        self._console.print(f"{SIGNS[status.state][0]} {job_name(job)}  {status.state}{reason}")

    def preparing(self, job: PlannedJob, what: str) -> None:
        if time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self._last = time.monotonic()
            self._console.print(f"  {job_name(job)}  {what}")

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        self.preparing(job, plain_progress(progress, job))

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        if line := headline(result):
            self._console.print(f"  {job_name(job)}  {line}")

    def note(self, text: str) -> None:
        self._console.print(f"  {text}")


def plain_progress(progress: JobProgress, job: PlannedJob) -> str:
    """Return a job's phase and progress in one line."""
    phase = "its ranks have ended" if progress.phase == "finished" else progress.phase  # beside the state "running"
    return "  ".join([phase, *_progress_parts(progress, job)])


def _progress_parts(progress: JobProgress, job: PlannedJob) -> list[str]:
    """Return how far a job is (steps, items or requests; share; remaining time), its figures, and its devices' load."""
    parts: list[str] = []
    work = job.job.work
    if progress.step:
        epochs = work.settings.end.max_epochs if isinstance(work, TrainingWork) else None
        parts.append(f"step {progress.step:,}" + (f"/{progress.total_steps:,}" if progress.total_steps else ""))
        parts.append(f"epoch {progress.epoch + 1:,}" + (f"/{epochs:,}" if epochs else ""))
    elif progress.samples:
        loads = isinstance(work, ServeJob) or progress.phase in get_args(LoadPhase)
        parts.append(f"{progress.samples:,} {'requests' if loads else 'items'}")
    if progress.share is not None:
        parts.append(percent(progress.share))
    if progress.eta_s is not None:
        parts.append(f"ETA {duration(progress.eta_s)}")
    if progress.loss is not None:
        parts.append(f"loss {digits(progress.loss)}")
    if progress.metric is not None:
        target = work.target if isinstance(work, TrainingWork) else None
        goal = f" (target {target.value:g})" if target is not None and target.metric == progress.metric[0] else ""
        parts.append(f"{progress.metric[0]} {progress.metric_text}{goal}")
    if progress.throughput is not None:
        parts.append(quantity(progress.throughput, f"{work.unit}s/s", 3))
    devices = progress.devices
    name, busy = ("cpu", devices.cpu) if devices.utilisation is None else ("device", devices.utilisation)
    if busy is not None:
        parts.append(f"{name} {percent(busy)}")
    if (memory := devices.memory_used_mib or devices.rank_memory_mib) is not None:
        parts.append(quantity(memory, "MiB", 3))
    if devices.power_w is not None:
        parts.append(quantity(devices.power_w, "W", 3))
    return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most ``width`` blocks, each the mean of an equal share of the values; "" of fewer than two values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


class _JsonDisplay(RunObserver):
    def __init__(self, run: str) -> None:
        self._run = run
        self._last: JobProgress | None = None
        self._printed = float("-inf")

    def __enter__(self) -> Self:
        self._emit("run", directory=self._run)
        return self

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        self._emit("state", job=job.directory, state=status.state, reason=status.reason, attempt=status.attempt)

    def preparing(self, job: PlannedJob, what: str) -> None:
        if time.monotonic() - self._printed >= 1:
            self._printed = time.monotonic()
            self._emit("preparing", job=job.directory, text=what)

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        if progress != self._last:
            self._last = progress
            self._emit("progress", job=job.directory, **asdict(progress))

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        figures = {name.value: figure.value for name, figure in result.figures.items()}
        self._emit("result", job=job.directory, converged=result.converged, figures=figures)

    def note(self, text: str) -> None:
        self._emit("note", text=text)

    def _emit(self, event: str, **value: Any) -> None:
        print(json.dumps({"at": utc_now(), "event": event, **value}), flush=True)


@dataclass(slots=True)
class Board:
    """The state of the live display."""

    plan: Plan
    statuses: dict[str, JobStatus]
    headlines: dict[str, str] = field(default_factory=dict)
    """The result of each finished round in one line."""
    progress: JobProgress = field(default_factory=JobProgress)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Since the current job changed its state."""
    preparing: str = ""
    """The current step of preparing a job, or of checking it after its end."""
    checking: str = ""
    notes: list[str] = field(default_factory=list)
    is_over: bool = False
    """Whether this is the last drawing, which stays on the terminal: notes are not cut off."""


def draw(board: Board, width: int) -> RenderableType:
    """Return the whole display for a terminal of ``width`` columns."""
    ended = [job for job in board.plan.jobs if board.statuses[job.directory].ended]
    queued = [job for job in board.plan.jobs if board.statuses[job.directory].state == "queued"]
    current = [job for job in board.plan.jobs if board.statuses[job.directory].state in ("preparing", "running")]
    parts: list[RenderableType] = [heading(board)]
    if len(ended) > _MOST_ENDED:
        parts.append(Text(f"  … {len(ended) - _MOST_ENDED} more ended", style="dim"))
    parts.extend(_job_line(board, job, width) for job in ended[-_MOST_ENDED:])
    for job in current:
        parts.append(_job_line(board, job, width))
        if board.progress.share is not None:
            bar = ProgressBar(total=1.0, completed=board.progress.share, width=max(10, min(32, width - 4)))
            parts.append(Padding(bar, (0, 0, 0, 2)))
        if facts := _progress_parts(board.progress, job):
            parts.append(Padding(Text("  ".join(facts)), (0, 0, 0, 2)))
        if len(board.losses) > 1:
            parts.append(Text(f"  loss {sparkline(board.losses, min(_MOST_BLOCKS, width - 7))}", style="cyan"))
    parts.extend(_job_line(board, job, width) for job in queued[:_MOST_QUEUED])
    if len(queued) > _MOST_QUEUED:
        parts.append(Text(f"  … {len(queued) - _MOST_QUEUED} more queued", style="dim"))
    if board.checking and not board.is_over:
        parts.append(Text(f"  {board.checking}", style="cyan", no_wrap=True, overflow="ellipsis"))
    for note in board.notes if board.is_over else board.notes[-2:]:
        lines = textwrap.wrap(note, width - 2, max_lines=None if board.is_over else 2, placeholder=" …")
        parts.append(Text("\n".join(f"  {line}" for line in lines), style="yellow"))
    return Constrain(Group(*parts), width)


def heading(board: Board) -> Text:
    """Return the heading: name, vendor and rounds of the run; of a search its trials so far and their limit, too."""
    ended = [status.state for status in board.statuses.values() if status.ended]
    unsuccessful = sum(state != "succeeded" for state in ended)
    done = f"{len(ended)} of {len(board.plan.jobs)} rounds ended"
    done += f", {unsuccessful} without success" if unsuccessful else ""
    if (tuning := board.plan.tuning) is not None:
        num_trials = sum(job.job.role == "trial" for job in board.plan.jobs)
        limit = f"of {tuning.max_trials}" if tuning.budget_s is None else f"within {duration(tuning.budget_s)}"
        done += f", {counted(num_trials, 'trial')} {limit}"
    return Text.assemble(("AccelMark", "bold"), (f"  {board.plan.name}  ·  {board.plan.vendor}  ·  {done}", "dim"))


def _job_line(board: Board, job: PlannedJob, width: int) -> Text:
    status = board.statuses[job.directory]
    sign, style = SIGNS[status.state]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{sign} ", style=style)
    line.append(job_name(job), style="" if status.state != "queued" else "dim")
    text = board.headlines.get(job.directory) if status.state == "succeeded" else None
    text = text or (f"{status.state}: {status.reason}" if status.ended and status.reason else status.state)
    if status.state in ("preparing", "running"):
        doing = board.preparing or (board.progress.phase if status.state == "running" else status.state)
        text = f"{doing}, {duration(board.seconds)}"
    most = 1 + status.ended + (status.state == "succeeded")  # the summary has the whole reason of a failure
    first, rest = max(_NARROWEST, width - line.cell_len - 2), "\n" + " " * (line.cell_len + 2)
    lines = textwrap.wrap(text, first, max_lines=most, placeholder=" …")
    line.append("  " + rest.join(lines), style="dim" if status.state in ("queued", "succeeded") else style)
    return line


def job_name(job: PlannedJob) -> str:
    """Return a job's name: its key without the repeat, of inference the engine, and its round of several."""
    key = job.job.key
    name = f"{key.model}:{key.framework}:{key.hardware}:{key.nnodes}:{key.nproc}"
    if isinstance(job.job.work, InferJob):
        name = " ".join(filter(None, (key.model, job.job.role, job.job.work.settings.title)))
    return f"{name} {job.job.round}/{key.repeat}" if key.repeat > 1 else name


def print_hanging(console: Console, *lines: Text) -> None:
    """Print lines at once; on a terminal no word is broken, and each line can be copied as one."""

    def hanging(line: Text) -> Text:
        indent = len(line.plain) - len(line.plain.lstrip())
        rows = line[indent:].wrap(console, console.width - indent - 4)
        for number, row in enumerate(rows):
            row.pad_left(indent + 4 * (number > 0))
            row.pad_right(console.width - row.cell_len)
        rows[-1].rstrip()
        return line.blank_copy().join(rows)

    shown = map(hanging, lines) if console.is_terminal else lines
    console.print(Text("\n").join(shown), soft_wrap=True)
