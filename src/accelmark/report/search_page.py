"""The report of an AutoML search: one HTML page, JSON and CSV."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accelmark.automl.controller.directory import SearchDirectory
from accelmark.automl.controller.state import SearchState
from accelmark.automl.records import TrialRecord
from accelmark.automl.scoring.score import Scoreboard
from accelmark.automl.scoring.summary import summarise
from accelmark.report.search_drawing import draw_family, draw_network, draw_workers
from accelmark.report.search_terminal import operations, ratio
from accelmark.report.templating import embed_json, fill, inline, plotly
from accelmark.results.rounds.search import SearchPoint, SearchSummary
from accelmark.results.store.files import write_atomic
from accelmark.spec.number_format import digits, quantity

MOST_DRAWN: Final = 60


@dataclass(frozen=True, slots=True)
class NetworkView:
    """One network with its accuracy and drawing."""

    id: int
    title: str
    line: str
    drawing: str


@dataclass(frozen=True, slots=True)
class SearchView:
    """Content of the page."""

    summary: SearchSummary
    tiles: tuple[tuple[str, str, str], ...]
    consumption: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    trials: tuple[tuple[object, ...], ...]
    """Values in the order of ``TRIAL_HEADINGS``; accuracies are ratios."""
    family: str
    workers: str
    networks: tuple[NetworkView, ...]
    left_out: int
    plots: dict[str, Any]
    config: str


def search_view(directory: SearchDirectory) -> SearchView:
    """Read a search and compute its page; raises RunError where it cannot be read."""
    state = directory.state()
    summary = summarise(directory, state=state)
    values = {one.id: one.value for one in state.individuals if one.value is not None}
    board = Scoreboard(state)
    best = {record.individual: board.best_validation(record.trial) for record in state.trials.values()}
    reached = {individual: accuracy for individual, accuracy in best.items() if accuracy is not None}
    return SearchView(
        summary=summary,
        tiles=_tiles(summary),
        consumption=_consumption(summary),
        rows=tuple(_row(row) for row in summary.series),
        trials=tuple(_trial(record, state) for record in state.trials.values()),
        family=draw_family(
            state.individuals, {one: reached[one] for one in values if one in reached}, "Family tree of the networks"
        ),
        workers=draw_workers(
            list(state.attempts.values()),
            state.epochs,
            summary.utilisation.workers,
            max([board.ended_s, *(record.ended_s or 0.0 for record in state.attempts.values())]),
            "Timeline of the workers",
        ),
        networks=_networks(state, reached),
        left_out=max(0, len(state.individuals) - MOST_DRAWN),
        plots=_plots(summary),
        config=directory.config().model_dump_json(indent=2),
    )


def _tiles(summary: SearchSummary) -> tuple[tuple[str, str, str], ...]:
    final, used = summary.final, summary.utilisation
    took = quantity(summary.duration_s, "s")
    return (
        ("Score", operations(final.score), f"operations per second, counted by {summary.counting}"),
        ("Error", ratio(final.error), "on the held-out split, which the search does not use"),
        ("Regulated score", operations(final.regulated_score), "-ln(error) × score"),
        ("Search error", ratio(final.search_error), "on the validation split, which the search optimizes"),
        ("Idle", ratio(used.idle_share), f"of {used.workers} workers' time was neither training nor evaluating"),
        (
            "Trials",
            str(summary.trials.get("finished", 0)),
            f"finished of {summary.trials_started} started; {summary.epochs} epochs in {took}",
        ),
    )


def _consumption(summary: SearchSummary) -> tuple[tuple[str, str, str], ...]:
    used = summary.consumption

    def tile(title: str, name: str, value: float | None, text: str) -> tuple[str, str, str]:
        return title, "-" if value is None else text, used.reasons.get(name, "while trials ran")

    return (
        tile("Power", "mean_power_w", used.mean_power_w, quantity(used.mean_power_w, "W")),
        tile("Energy", "energy_j", used.energy_j, quantity(used.energy_j, "J")),
        tile("Processor use", "cpu_utilisation", used.cpu_utilisation, ratio(used.cpu_utilisation)),
        tile("Device use", "device_utilisation", used.device_utilisation, ratio(used.device_utilisation)),
    )


def _row(row: SearchPoint) -> tuple[str, ...]:
    return (
        digits(row.time_h),
        ratio(row.error),
        ratio(row.search_error),
        operations(row.score),
        operations(row.regulated_score),
        digits(row.operations),
    )


def _trial(record: TrialRecord, state: SearchState) -> tuple[object, ...]:
    epochs = state.epochs_of(record)
    best = max((epoch.validation_accuracy for epoch in epochs if epoch.validation_accuracy is not None), default=None)
    hyper = record.hyperparameters
    settings = [f"batch {hyper.batch_size}", f"rate {digits(hyper.learning_rate)}"]
    settings += [f"kernel {hyper.kernel}"] if hyper.kernel is not None else []
    settings += [f"dropout {digits(hyper.dropout, 2)}"] if hyper.dropout is not None else []
    return (
        record.trial,
        record.individual,
        record.round,
        record.status + (f" (attempt {record.attempt})" if record.attempt > 1 else ""),
        f"{sum(epoch.complete for epoch in epochs)}/{record.epochs_planned}",
        best,
        record.held_out_accuracy,
        record.parameters,
        record.weights,
        ", ".join(settings) + (" (TPE)" if record.tuned else ""),
        record.reason,
    )


def _networks(state: SearchState, reached: dict[int, float]) -> tuple[NetworkView, ...]:
    best = sorted(state.individuals, key=lambda one: reached.get(one.id, -1.0), reverse=True)[:MOST_DRAWN]
    return tuple(
        NetworkView(
            id=one.id,
            title=f"Network {one.id}",
            line=(f"from {one.parent}: " if one.parent is not None else "")
            + (", ".join(map(str, one.morphs)) or "seed")
            + (f"; validation accuracy {digits(reached[one.id])}" if one.id in reached else "; not validated"),
            drawing=draw_network(one.network, f"Network {one.id}"),
        )
        for one in sorted(best, key=lambda one: one.id)
    )


def _plots(summary: SearchSummary) -> dict[str, Any]:
    hours = [row.time_h for row in summary.series]
    return {
        "Score": {"x": hours, "y": [row.score for row in summary.series], "unit": "operations / s"},
        "Error": {
            "x": hours,
            "y": [row.error for row in summary.series],
            "unit": "held-out error",
            "other": [row.search_error for row in summary.series],
            "other_name": "search error",
        },
        "Regulated score": {
            "x": hours,
            "y": [row.regulated_score for row in summary.series],
            "unit": "operations / s",
        },
    }


_LOGS = ("journal.jsonl", "automl.json", "network.json", "study.journal")


def write_report(directory: SearchDirectory, *, logs: bool = False) -> tuple[Path, ...]:
    """Write the report into the search's directory, with ``logs`` also an archive of its records; return the files."""
    view = search_view(directory)
    page, data = directory.path / "report.html", directory.path / "report.json"
    table, trials = directory.path / "report.csv", directory.path / "trials.csv"
    write_atomic(page, render_search(view))
    write_atomic(data, view.summary.to_json() + "\n")
    series = [tuple(row.model_dump().values()) for row in view.summary.series]
    write_atomic(table, _csv(tuple(type(view.summary.final).model_fields), series))
    write_atomic(trials, _csv(TRIAL_HEADINGS, view.trials))
    written = [page, data, table, trials]
    if logs:
        written.append(_archive(directory))
    return tuple(written)


TRIAL_HEADINGS = (
    "trial", "network", "round", "status", "epochs", "validation", "held out", "parameters", "weights", "settings",
    "reason",
)  # fmt: skip


def render_search(view: SearchView) -> str:
    """Return the page as self-contained HTML; all texts are escaped."""
    from markupsafe import Markup

    return fill(
        "search.html",
        view=view,
        summary=view.summary,
        headings=TRIAL_HEADINGS,
        trials=[[_trial_cell(value) for value in trial] for trial in view.trials],
        style=inline("page.css") + inline("search.css"),
        script=inline("search.js"),
        plotly=plotly(),
        data=embed_json(view.plots),
        family=Markup(view.family),  # noqa: S704 - drawn here, texts escaped
        workers=Markup(view.workers),  # noqa: S704 - drawn here, texts escaped
        drawings={one.id: Markup(one.drawing) for one in view.networks},  # noqa: S704 - drawn here, texts escaped
    )


def _trial_cell(value: object) -> str:
    if value is None or isinstance(value, float):
        return ratio(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _csv(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([["" if value is None else _harmless(value) for value in row] for row in rows])
    return text.getvalue()


def _harmless(value: object) -> object:
    """Prevent spreadsheets from interpreting a text as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "@") else value


def _archive(directory: SearchDirectory) -> Path:
    target = directory.path / "logs.tar.gz"
    beside = target.with_suffix(".part")
    with tarfile.open(beside, "w:gz") as archive:
        for name in _LOGS:
            if (directory.path / name).is_file():
                archive.add(directory.path / name, arcname=f"{directory.name}/{name}")
    shutil.move(beside, target)
    return target
