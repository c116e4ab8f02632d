"""A run on the terminal: live while it goes on, and its figures when it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from accelmark.automl.engine.state import RunState
from accelmark.automl.records import TrialStatus
from accelmark.automl.schedule import Scheduler
from accelmark.spec.number_format import duration, quantity

if TYPE_CHECKING:
    from accelmark.automl.engine.coordinator import Observer
    from accelmark.automl.summary import Summary

_SHOWN: Final = 12
_STYLES: Final[dict[TrialStatus, str]] = {"running": "cyan", "finished": "green", "cut": "yellow"}
_ENDS: Final = {
    "trials": "all its trials were done",
    "time": "its time was used up",
    "asked": "it was asked to stop",
    "exhausted": "no network was left that its morphs could make within its limits",
}
"""Why a session ended, in words."""


@contextmanager
def live_view() -> Iterator[Observer]:
    """Show trials, score and idleness while a run goes on; give the observer that a coordinator calls."""
    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as live:

        def observe(state: RunState, scheduler: Scheduler) -> None:
            live.update(_picture(state, scheduler))

        yield observe


def _picture(state: RunState, scheduler: Scheduler) -> Group:
    point, used = state.scoreboard().final(), state.utilisation()
    counts = Counter(record.status for record in state.trials.values())
    limit = scheduler.schedule.max_s
    head = Table.grid(padding=(0, 3))
    head.add_row(
        *("time", "score", "error", "regulated", "idle", "best of search"),
        style="dim",
    )
    head.add_row(
        duration(state.clock_s) + ("" if limit is None else f" of {duration(limit)}"),
        _ops(point.score),
        _ratio(point.error),
        _ops(point.regulated_score),
        _ratio(used.idle_share),
        _ratio(point.search_error),
    )
    bound = scheduler.schedule.max_trials
    told = ", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "none yet"
    trials = Text(
        f"trials: {told}{'' if bound is None else f'; {bound} at most'}; {len(scheduler.ready)} networks ready",
        style="dim",
    )
    parts: list[RenderableType] = [head, trials, _trials(state)]
    if state.notes:
        last = Text(f"{duration(state.notes[-1].clock_s)}: {state.notes[-1].text}", style="yellow", overflow="ellipsis")
        last.no_wrap = True
        parts.append(last)
    return Group(*parts)


def _trials(state: RunState) -> Table:
    """Return a table of the trials that run and of the latest others; the network's last morph where there is room."""
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for heading in ("trial", "worker", "round"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    table.add_column("status", no_wrap=True, min_width=len("finished"))
    for heading in ("epoch", "accuracy", "held out"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    table.add_column("network", no_wrap=True, overflow="ellipsis", ratio=1)
    latest = sorted(state.trials.values(), key=lambda record: (record.status == "running", record.trial))[-_SHOWN:]
    for record in latest:
        seen = [
            epoch
            for epoch in state.epochs
            if (epoch.trial, epoch.attempt) == (record.trial, record.attempt) and epoch.complete
        ]
        table.add_row(
            str(record.trial),
            str(record.worker),
            str(record.round),
            Text(record.status, style=_STYLES.get(record.status, "red")),
            f"{len(seen)}/{record.epochs_planned}",
            _ratio(max((epoch.validation_accuracy or 0 for epoch in seen), default=None)),
            _ratio(record.held_out_accuracy),
            ", ".join(map(str, reversed(record.morphs))) or "seed",
        )
    return table


def show_summary(summary: Summary) -> None:
    """Print a run's figures, the reason of a failure first."""
    console = Console()
    judged, final, used = summary.judgement, summary.final, summary.consumption
    style = "green" if judged.verdict == "VALID" else "red"
    console.print(Text(f"{judged.verdict} by rules {judged.rules} (version {judged.version})", style=style))
    for reason in judged.reasons:
        console.print(Text(f"  not valid: {reason}", style="red"))
    for failure in summary.failures[-3:]:
        console.print(Text(f"  {failure}", style="yellow"))
    for line in judged.disclosures:
        console.print(f"  {line}", highlight=False)
    rows = {
        "run": f"{summary.run} ({summary.standing}{_because(summary.ended_because)})",
        "trials": ", ".join(f"{number} {status}" for status, number in sorted(summary.trials.items())),
        "duration": quantity(summary.duration_s, "s"),
        "score": f"{_ops(final.score)} ({summary.counting})",
        "error": f"{_ratio(final.error)} held out, {_ratio(final.search_error)} best of search",
        "regulated score": _ops(final.regulated_score),
        "idle": _ratio(summary.utilisation.idle_share),
        "power": _measured(used.mean_power_w, "W", used.reasons.get("mean_power_w", "")),
        "processor use": _ratio(used.cpu_utilisation)
        if used.cpu_utilisation is not None
        else _measured(None, "", used.reasons.get("cpu_utilisation", "")),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _because(reason: str | None) -> str:
    return "" if reason is None else f": {_ENDS.get(reason, reason)}"


def _measured(value: float | None, unit: str, reason: str) -> str:
    return f"not measured: {reason}" if value is None else quantity(value, unit)


def _ops(value: float | None) -> str:
    return quantity(value, "OP/s")


def _ratio(value: float | None) -> str:
    return quantity(value, "ratio")
