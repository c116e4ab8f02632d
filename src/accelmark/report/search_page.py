"""The report of an AutoML search: one HTML page, JSON and CSV."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from accelmark.automl.controller.journal import SearchDirectory, SearchState
from accelmark.automl.records import TrialRecord
from accelmark.automl.scoring.score import Scoreboard, summarise
from accelmark.report.search_drawing import draw_family, draw_network, draw_workers
from accelmark.report.templating import embed_json, fill, inline, plotly
from accelmark.results.rounds.search import SearchPoint, SearchSummary
from accelmark.results.store.files import write_atomic
from accelmark.results.table import Cell, to_csv
from accelmark.spec.number_format import digits, scale_of

_MOST_DRAWN: Final = 60
_LOGS: Final = ("journal.jsonl", "automl.json", "network.json", "study.journal")
_TRIAL_HEADINGS: Final = (
    "trial", "network", "round", "status", "epochs", "validation", "held out", "parameters", "weights", "settings",
    "reason",
)  # fmt: skip


def render_search(directory: SearchDirectory) -> str:
    """Return the page as self-contained HTML; raises RunError where the search cannot be read."""
    state = directory.state()
    return _page(directory, state, summarise(directory, state=state), _trials(state))


def write_report(directory: SearchDirectory, *, logs: bool = False) -> list[Path]:
    """Write the report into the search's directory, with ``logs`` also an archive of its records; return the files."""
    state = directory.state()
    summary, trials = summarise(directory, state=state), _trials(state)
    series = [tuple(point.model_dump().values()) for point in summary.series]
    texts = {
        "report.html": _page(directory, state, summary, trials),
        "report.json": summary.to_json() + "\n",
        "report.csv": to_csv(tuple(SearchPoint.model_fields), series),
        "trials.csv": to_csv(_TRIAL_HEADINGS, trials),
    }
    for name, text in texts.items():
        write_atomic(directory.path / name, text)
    written = [directory.path / name for name in texts]
    return [*written, _archive(directory)] if logs else written


def _page(
    directory: SearchDirectory, state: SearchState, summary: SearchSummary, trials: Iterable[Sequence[Cell]]
) -> str:
    board, individuals = Scoreboard(state), state.individuals
    reached = {record.individual: board.best_validation(record.trial) for record in state.trials.values()}
    known = {one.id: accuracy for one in individuals if (accuracy := reached.get(one.id)) is not None}
    best = sorted(individuals, key=lambda one: known.get(one.id, -1.0), reverse=True)[:_MOST_DRAWN]
    time = scale_of(3600 * max((point.time_h for point in summary.series), default=0.0), "s")
    times = [3600 * point.time_h / time.divisor for point in summary.series]
    score, regulated = ([getattr(one, name) for one in summary.series] for name in ("score", "regulated_score"))
    error, search_error = ([getattr(one, name) for one in summary.series] for name in ("error", "search_error"))
    plots: dict[str, dict[str, Any]] = {
        "Score": {"x": times, "y": score, "unit": "operations / s"},
        "Error": {
            "x": times, "y": error, "unit": "held-out error", "other": search_error, "other_name": "search error",
        },
        "Regulated score": {"x": times, "y": regulated, "unit": "operations / s"},
    }  # fmt: skip
    with_values = {
        name: plot for name, plot in plots.items() if any(y is not None for y in (*plot["y"], *plot.get("other", ())))
    }
    return fill(
        "search/search.html",
        summary=summary,
        headings=_TRIAL_HEADINGS,
        trials=trials,
        digits=digits,
        time=time,
        plots=tuple(with_values),
        family=draw_family(
            individuals, {one.id: known[one.id] for one in individuals if one.id in known and one.value is not None}
        ),
        bars=list(draw_workers(state)),
        until_s=max([board.ended_s, *(record.ended_s or 0.0 for record in state.attempts.values())]),
        networks=[(one, known.get(one.id), draw_network(one.network)) for one in sorted(best, key=lambda one: one.id)],
        left_out=max(0, len(individuals) - _MOST_DRAWN),
        config=directory.config().model_dump_json(indent=2),
        style=inline("page.css") + inline("search/search.css"),
        script=inline("theme.js") + inline("search/search.js"),
        plotly=plotly(),
        data=embed_json({"unit": time.unit, "plots": with_values}),
    )


def _trials(state: SearchState) -> list[tuple[Cell, ...]]:
    """Return the values of each trial in the order of the headings; accuracies are ratios."""
    return [_trial(record, state) for record in state.trials.values()]


def _trial(record: TrialRecord, state: SearchState) -> tuple[Cell, ...]:
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


def _archive(directory: SearchDirectory) -> Path:
    target = directory.path / "logs.tar.gz"
    part = target.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for name in _LOGS:
            if (directory.path / name).is_file():
                archive.add(directory.path / name, arcname=f"{directory.name}/{name}")
    return part.replace(target)
