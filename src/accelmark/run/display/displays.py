"""Displays of a run: live on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Self, final

from rich.console import Console
from rich.live import Live

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.figures import FIGURES, FigureName, format_figure
from accelmark.results.schema import RoundResult
from accelmark.run.display.live import SIGNS, Board, draw, job_name, place_and_eta
from accelmark.run.display.progress import JobProgress, metric_text
from accelmark.run.record.states import JobStatus, utc_now
from accelmark.spec.number_format import digits, duration, percent, quantity

_PLAIN_EVERY_S: Final = 10.0
_CHECKED_WITHIN_S: Final = 2.0
"""Time of the check of hosts from which it is printed."""
_UNCHANGED_EVERY_S: Final = 60.0
_DRAWN_EVERY_S: Final = 0.25
_MOST_LOSSES: Final = 4096

_HEADLINES: Final = (
    FigureName.FINAL_METRIC, FigureName.THROUGHPUT_TRAIN, FigureName.RAW_TRAIN_TIME, FigureName.INFERENCE_CORE,
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
        """Hosts are being checked before a start; ``what`` is empty at the end."""

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
        return JsonDisplay(run)
    console = Console(highlight=False, soft_wrap=True)
    on_terminal = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(plan, dict(statuses)) if on_terminal else PlainDisplay(console)


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
            parts.append(f"{FIGURES[name].title} {shown}" if FIGURES[name].unit in ("ratio", "ms") else shown)
    return ", ".join(parts)


@final
class LiveDisplay(RunObserver):
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
        """Draw the job's new state."""
        self._board.statuses[job.directory] = status
        if status.state in ("preparing", "running"):
            self._since = time.monotonic()
            self._board.progress, self._board.losses, self._board.preparing = JobProgress(), [], ""
        self._draw()

    def planned(self, plan: Plan) -> None:
        """Draw the jobs of the new plan."""
        for job in plan.jobs:
            self._board.statuses.setdefault(job.directory, JobStatus())
        self._board.plan = plan

    def checking(self, what: str) -> None:
        """Draw that hosts are being checked."""
        self._board.checking = what
        self._draw()

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Draw the step, at most a few times a second; after a job has run, with its own time."""
        status = self._board.statuses[job.directory]
        if self._board.preparing != what and status.state != "preparing":
            self._since = time.monotonic()
        self._board.preparing = what
        if status.ended:  # resumed to check its weights
            self._board.checking = f"{job_name(job)}: {what}, {duration(time.monotonic() - self._since)}"
        if time.monotonic() - self._drawn > _DRAWN_EVERY_S:
            self._draw()

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        """Draw the job's progress."""
        losses = self._board.losses
        if progress.loss is not None and progress.step != self._board.progress.step:
            losses.append(progress.loss)
            del losses[:-_MOST_LOSSES]
        self._board.progress, self._board.preparing = progress, ""
        self._draw()

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Draw the round's result."""
        self._board.headlines[job.directory], self._board.checking = headline(result), ""
        self._draw()

    def note(self, text: str) -> None:
        """Draw a note below the jobs."""
        self._board.notes.append(text)
        self._draw()

    def _draw(self) -> None:
        self._board.seconds = time.monotonic() - self._since
        self._drawn = time.monotonic()
        # One column is left free: what the terminal echoes (^C) behind a full line would begin a new one.
        self._live.update(draw(self._board, self._console.width - 1), refresh=True)


@final
class PlainDisplay(RunObserver):
    """Prints a line for each change of state, and while a job runs about every ten seconds, unchanged every minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic() - _PLAIN_EVERY_S + _CHECKED_WITHIN_S
        self._rare = ""

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Print the job's new state."""
        self._last = time.monotonic()
        reason = f": {status.reason}" if status.reason else ""
        self._print(f"{SIGNS[status.state][0]} {job_name(job)}  {status.state}{reason}")

    def checking(self, what: str) -> None:
        """Print that hosts are being checked, where that takes long, every ten seconds."""
        if what and time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self._last = time.monotonic()
            self._print(f"  {what}")

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Print the step, at most every ten seconds; an unchanged one every minute."""
        self._print_rarely(job, what)

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        """Print the job's progress, at most every ten seconds; unchanged every minute."""
        self._print_rarely(job, plain_progress(progress, job))

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Print the round's result, where it has one."""
        if line := headline(result):
            self._print(f"  {job_name(job)}  {line}")

    def note(self, text: str) -> None:
        """Print the note."""
        self._print(f"  {text}")

    def _print_rarely(self, job: PlannedJob, text: str) -> None:
        line = f"  {job_name(job)}  {text}"
        if time.monotonic() - self._last >= (_UNCHANGED_EVERY_S if line == self._rare else _PLAIN_EVERY_S):
            self._last, self._rare = time.monotonic(), line
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)


def plain_progress(progress: JobProgress, job: PlannedJob) -> str:
    """Return a job's progress in one line."""
    phase = "its ranks have ended" if progress.phase == "finished" else progress.phase  # beside the state "running"
    parts: list[str] = [phase, *place_and_eta(progress, job)]
    if progress.loss is not None:
        parts.append(f"loss {digits(progress.loss)}")
    if progress.metric is not None:
        parts.append(f"{progress.metric[0]} {progress.metric_text}")
    if progress.throughput is not None:
        parts.append(quantity(progress.throughput, f"{job.job.work.unit}s/s", 3))
    devices = progress.devices
    name, busy = ("cpu", devices.cpu) if devices.utilisation is None else ("device", devices.utilisation)
    if busy is not None:
        parts.append(f"{name} {percent(busy)}")
    if devices.power_w is not None:
        parts.append(quantity(devices.power_w, "W", 3))
    return "  ".join(parts)


@final
class JsonDisplay(RunObserver):
    """Prints one JSON object per line, for programs."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._last: JobProgress | None = None
        self._printed = float("-inf")

    def __enter__(self) -> Self:
        self._emit("run", directory=self._run)
        return self

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        """Print the job's new state."""
        self._emit("state", job=job.directory, state=status.state, reason=status.reason, attempt=status.attempt)

    def preparing(self, job: PlannedJob, what: str) -> None:
        """Print the step, about once a second."""
        if time.monotonic() - self._printed >= 1:
            self._printed = time.monotonic()
            self._emit("preparing", job=job.directory, text=what)

    def progress(self, job: PlannedJob, progress: JobProgress) -> None:
        """Print the job's progress where it has changed."""
        if progress != self._last:
            self._last = progress
            self._emit("progress", job=job.directory, **asdict(progress))

    def result(self, job: PlannedJob, result: RoundResult) -> None:
        """Print the round's figures."""
        figures = {name.value: figure.value for name, figure in result.figures.items()}
        self._emit("result", job=job.directory, converged=result.converged, figures=figures)

    def note(self, text: str) -> None:
        """Print the note."""
        self._emit("note", text=text)

    def _emit(self, event: str, **value: Any) -> None:
        print(json.dumps({"at": utc_now(), "event": event, **value}), flush=True)
