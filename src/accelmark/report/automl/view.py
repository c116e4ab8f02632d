"""Content of a search's page as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from accelmark.automl.controller.directory import SearchDirectory
from accelmark.automl.controller.state import SearchState
from accelmark.automl.records import TrialRecord
from accelmark.automl.scoring.summary import summarise
from accelmark.report.automl.drawing import draw_family, draw_network, draw_workers
from accelmark.report.automl.terminal import operations, ratio
from accelmark.results.rounds.search import SearchPoint, SearchSummary
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
    trials: tuple[tuple[str, ...], ...]
    family: str
    workers: str
    networks: tuple[NetworkView, ...]
    left_out: int
    plots: dict[str, Any]
    config: str


def search_view(directory: SearchDirectory) -> SearchView:
    """Read a search and compute its page; raises RunError or JournalError where it cannot be read."""
    state = directory.state()
    summary = summarise(directory, state=state)
    values = {one.id: one.value for one in state.individuals if one.value is not None}
    board = state.scoreboard()
    validated = {epoch.trial for epoch in board.epochs if epoch.validation_accuracy is not None}
    reached = {
        record.individual: board.best_validation(record.trial)
        for record in state.trials.values()
        if record.trial in validated
    }
    return SearchView(
        summary=summary,
        tiles=_tiles(summary),
        consumption=_consumption(summary),
        rows=tuple(_row(row) for row in summary.series),
        trials=tuple(_trial_row(record, state) for record in state.trials.values()),
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


def _trial_row(record: TrialRecord, state: SearchState) -> tuple[str, ...]:
    epochs = state.epochs_of(record)
    best = max((epoch.validation_accuracy for epoch in epochs if epoch.validation_accuracy is not None), default=None)
    hyper = record.hyperparameters
    settings = [f"batch {hyper.batch_size}", f"rate {digits(hyper.learning_rate)}"]
    settings += [f"kernel {hyper.kernel}"] if hyper.kernel is not None else []
    settings += [f"dropout {digits(hyper.dropout, 2)}"] if hyper.dropout is not None else []
    return (
        str(record.trial),
        str(record.individual),
        str(record.round),
        record.status + (f" (attempt {record.attempt})" if record.attempt > 1 else ""),
        f"{sum(epoch.complete for epoch in epochs)}/{record.epochs_planned}",
        ratio(best),
        ratio(record.held_out_accuracy),
        f"{record.parameters:,}",
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
