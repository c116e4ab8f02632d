"""A search on the terminal: live progress, and the figures at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from accelmark.automl.journal import SearchState
from accelmark.automl.records import TrialStatus
from accelmark.automl.search.schedule import Scheduler
from accelmark.results.rounds.search import SearchSummary
from accelmark.spec.number_format import NOTHING, counted, duration, quantity

if TYPE_CHECKING:
    from accelmark.automl.controller import Observer

_operations, _ratio = partial(quantity, unit="OP/s"), partial(quantity, unit="ratio")
_STYLES: Final[dict[TrialStatus, str]] = {"running": "cyan", "finished": "green", "cut": "yellow"}


@contextmanager
def live_view() -> Iterator[Observer]:
    """Show trials, score and idle share while a search runs; yield the observer that the controller calls."""
    starting = Spinner("dots", "checking the request and starting workers …")
    with Live(starting, console=Console(stderr=True), refresh_per_second=2, transient=True) as live:
        yield lambda state, scheduler: live.update(_progress(state, scheduler))


def _progress(state: SearchState, scheduler: Scheduler) -> Group:
    from accelmark.automl.scoring import Scoreboard, utilisation  # not needed by `status`

    point, used = Scoreboard(state).final(), utilisation(state)
    limit, most = scheduler.schedule.max_duration, scheduler.schedule.max_trials
    head = Table.grid(padding=(0, 3))
    head.add_row("time", "score", "error", "regulated", "idle", "search error", style="dim")
    scores = (_operations(point.score), _ratio(point.error), _operations(point.regulated_score))
    clock = duration(state.clock_s) + ("" if limit is None else f" of {duration(limit)}")
    head.add_row(clock, *scores, _ratio(used.idle_share), _ratio(point.search_error))
    counts = _counts(dict(Counter(record.status for record in state.trials.values()))) or "none yet"
    ready = counted(len(scheduler.ready), "network")
    trials = f"trials: {counts}{'' if most is None else f'; {most} at most'}; {ready} ready"
    # The running and the latest other trials, with the network's morphs where there is room.
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for heading in ("trial", "worker", "round", "status", "epoch", "accuracy", "held out"):
        width = len("finished") if heading == "status" else len(heading)
        table.add_column(heading, justify="left" if heading == "status" else "right", no_wrap=True, min_width=width)
    table.add_column("network", no_wrap=True, overflow="ellipsis", ratio=1)
    latest = nlargest(12, state.trials.values(), key=lambda record: (record.status == "running", record.trial))
    for record in reversed(latest):
        totals = state.totals_of(record)
        numbers = map(str, (record.trial, record.worker, record.round))
        status = Text(record.status, style=_STYLES.get(record.status, "red"))
        ratios = (_ratio(totals.accuracy), _ratio(record.held_out_accuracy))
        morphs = ", ".join(map(str, reversed(record.morphs))) or "seed"
        table.add_row(*numbers, status, f"{totals.complete}/{record.epochs_planned}", *ratios, morphs)
    parts: list[RenderableType] = [head, Text(trials, style="dim"), table]
    if state.notes:
        note = f"{duration(state.notes[-1].clock_s)}: {state.notes[-1].text}"
        parts.append(Text(note, style="yellow", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _counts(trials: dict[str, int]) -> str:
    return ", ".join(f"{number} {status}" for status, number in sorted(trials.items()))


def show_summary(summary: SearchSummary) -> None:
    """Print a search's verdict, failures and figures."""
    console = Console()
    verdict, final, used = summary.judgement, summary.final, summary.consumption
    rules, running = verdict.by_rules, summary.status == "running"
    style = "cyan" if running else "green" if verdict.verdict == "VALID" else "red"
    head = f"running: {rules} judge it at its end" if running else f"{verdict.verdict} by {rules}"
    if summary.status in ("interrupted", "stopped"):
        head = f"{summary.status}, {verdict.verdict} by {rules} as it stands"
    console.print(Text(head, style=style))
    reasons = [] if running else [(f"not valid: {reason}", "red") for reason in verdict.reasons]
    failures = [(failure, "yellow") for failure in summary.failures[-3:]]
    for line, style in (*reasons, *failures, *((line, "") for line in verdict.disclosures)):
        console.print(Padding(Text(line, style=style), (0, 0, 0, 2)))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("run", f"{summary.run} ({summary.outcome})")
    table.add_row("trials", _counts(summary.trials))
    measured = summary.duration_s > 0
    table.add_row("duration", quantity(summary.duration_s, "s") if measured else f"{NOTHING} (no epoch has ended)")
    table.add_row("score", f"{_operations(final.score if measured else None)} ({summary.counting})")
    table.add_row("error", f"{_ratio(final.error)} held out, {_ratio(final.search_error)} on the validation split")
    table.add_row("regulated score", _operations(final.regulated_score))
    table.add_row("idle", _ratio(summary.utilisation.idle_share))
    for title, name, unit in (("power", "mean_power_w", "W"), ("processor use", "cpu_utilisation", "ratio")):
        value = getattr(used, name)
        missing = f"not measured: {used.reasons.get(name, '')}"
        table.add_row(title, missing if value is None else quantity(value, unit))
    console.print(table)
