"""Render the live display: pure functions from its state to rich renderables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final, get_args

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.schema import JobState
from accelmark.run.display.progress import DeviceLoad, JobProgress
from accelmark.run.record.states import JobStatus
from accelmark.spec.job import InferJob, ServeJob, TrainingWork
from accelmark.spec.log.serving import LoadPhase
from accelmark.spec.number_format import counted, digits, duration, percent, quantity

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
_LOSSES_SHOWN: Final = 24
_NARROWEST: Final = 16
"""Least columns for a job's result, however narrow the terminal is."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


@final
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
    """The check of hosts before a start, while it goes on."""
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
    parts.extend(job_line(board, job, width) for job in ended[-_MOST_ENDED:])
    for job in current:
        parts.append(job_line(board, job, width))
        parts.extend(progress_lines(board, job, width))
    parts.extend(job_line(board, job, width) for job in queued[:_MOST_QUEUED])
    if len(queued) > _MOST_QUEUED:
        parts.append(Text(f"  … {len(queued) - _MOST_QUEUED} more queued", style="dim"))
    if board.checking:
        parts.append(Text(f"  {board.checking}", style="cyan", no_wrap=True, overflow="ellipsis"))
    notes = board.notes if board.is_over else board.notes[-2:]
    parts.extend(_note(note, width, None if board.is_over else 2) for note in notes)
    return Constrain(Group(*parts), width)


def _note(note: str, width: int, max_lines: int | None) -> Text:
    """Return a note on at most ``max_lines`` lines."""
    lines = textwrap.wrap(note, width - 2, max_lines=max_lines, placeholder=" …")
    return Text("\n".join(f"  {line}" for line in lines), style="yellow")


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


def job_line(board: Board, job: PlannedJob, width: int) -> Text:
    """Return a job's state, name, round, and result or current phase; on up to four lines where it has ended."""
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
    indent = line.cell_len + 2
    below = status.ended and width - indent < _NARROWEST  # the result has lines of its own
    indent = 4 if below else indent
    most = 1 + status.ended + (status.state == "succeeded")  # the summary has the whole reason of a failure
    lines = textwrap.wrap(text, max(_NARROWEST, width - indent), max_lines=most, placeholder=" …")
    text = (f"\n{' ' * indent}" if below else "  ") + f"\n{' ' * indent}".join(lines)
    line.append(text, style="dim" if status.state in ("queued", "succeeded") else style)
    return line


def job_name(job: PlannedJob) -> str:
    """Return a job's name: its key without the repeat, of inference the engine, and its round of several."""
    key = job.job.key
    name = f"{key.model}:{key.framework}:{key.hardware}:{key.nnodes}:{key.nproc}"
    if isinstance(job.job.work, InferJob):
        name = " ".join(filter(None, (key.model, job.job.role, job.job.work.settings.title)))
    return f"{name} {job.job.round}/{key.repeat}" if key.repeat > 1 else name


def progress_lines(board: Board, job: PlannedJob, width: int) -> Sequence[RenderableType]:
    """Return the lines under a running job."""
    progress = board.progress
    lines: list[RenderableType] = [_devices(progress)] if progress.devices != DeviceLoad() else []
    if measured := _measured(board, job, width):
        lines.insert(0, measured)
    if place := "  ".join(place_and_eta(progress, job)):
        position = Table.grid(padding=(0, 1), expand=False)
        for _ in range(3 if progress.share is not None else 2):
            position.add_column(no_wrap=True, overflow="ellipsis")
        cells: list[RenderableType] = [Text(place, no_wrap=True, overflow="ellipsis")]
        if progress.share is not None:
            cells.insert(0, ProgressBar(total=1.0, completed=progress.share, width=max(10, min(32, width - 50))))
        position.add_row(" ", *cells)
        lines.insert(0, position)
    return lines


def place_and_eta(progress: JobProgress, job: PlannedJob) -> list[str]:
    """Return how far a job is: steps and epochs, items or requests; completed share; remaining time."""
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
    return parts


def _measured(board: Board, job: PlannedJob, width: int) -> Text | None:
    """Return throughput, loss and metric; None before the first of them."""
    progress = board.progress
    if progress.throughput is None and progress.loss is None and progress.metric is None:
        return None
    line = Text("  ", no_wrap=True, overflow="ellipsis")
    if progress.throughput is not None:
        line.append(quantity(progress.throughput, f"{job.job.work.unit}s/s", 3) + "  ", style="bold")
    if progress.loss is not None:
        line.append(f"loss {digits(progress.loss)} ")
        line.append(spark(board.losses, min(_LOSSES_SHOWN, max(8, width - 64))), style="cyan")
        line.append("  ")
    if progress.metric is not None:
        name, value = progress.metric
        line.append(f"{name} {progress.metric_text}")
        work = job.job.work
        target = work.target if isinstance(work, TrainingWork) else None
        if target is not None and target.metric == name:
            style = "green" if target.reached(value) else "dim"
            line.append(f" ({'≥' if target.direction == 'at_least' else '≤'} {target.value:g})", style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def _devices(progress: JobProgress) -> Text:
    devices = progress.devices
    shown: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        ("device ", devices.utilisation, percent),
        ("", devices.memory_used_mib, lambda size: quantity(size, "MiB", 3)),
        ("", devices.power_w, lambda power: quantity(power, "W", 3)),
        ("cpu ", devices.cpu, percent),
        ("ranks ", devices.rank_memory_mib, lambda size: quantity(size, "MiB", 3)),
        ("host ", devices.host_memory_used_mib, lambda size: quantity(size, "MiB", 3)),
    )
    parts = [f"  {name}{written(value)}" for name, value, written in shown if value is not None]
    return Text("".join(parts), style="dim", no_wrap=True, overflow="ellipsis")


def spark(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most ``width`` blocks; each block is the mean of an equal share of the values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
