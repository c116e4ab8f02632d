"""What each address shows."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from accelmark.report.charts import scaling_chart, trend_chart
from accelmark.report.runs_table import figure_cell, shown_columns
from accelmark.report.serve.index import RunIndex, Seen
from accelmark.report.serve.live import live_run, live_runs
from accelmark.report.shell import fill
from accelmark.results.compare.table import HALF, Row
from accelmark.results.figures.definitions import FIGURES, FigureName, title_of, unit_of
from accelmark.results.read.sources import load_source
from accelmark.results.rounds.search import is_search
from accelmark.results.store.store import LoadedRun
from accelmark.spec.errors import RequestError
from accelmark.spec.number_format import NOTHING, quantity

Query = Mapping[str, Sequence[str]]
FILTERS: Final = (("Case", "case"), ("Chip", "chip"), ("Scale", "scale"), ("Verdict", "verdict"))
_MOST_COLUMNS: Final = 4
"""Figures that get a column each; more, as of unlike cases, stand in one column with their names."""
HTML: Final = "text/html; charset=utf-8"


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """What a page comes to."""

    body: str
    kind: str = HTML
    status: int = 200
    inline: bool = False
    """Whether the page brings its own scripts and styles inside it, as the page of a run does."""


@final
class Pages:
    """All pages over the runs of one index."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._at: dict[str, Callable[[Query], Reply]] = {
            "/": self.runs, "/live": self.live, "/compare": self.compare, "/scaling": self.scaling,
            "/trend": self.trend, "/results.json": self.results_json, "/metrics": self.metrics,
        }  # fmt: skip

    def reply(self, path: str, query: Query) -> Reply:
        """Return the page at ``path``; what is not there is a page too."""
        try:
            if path.startswith("/run/"):
                return self.run(path.removeprefix("/run/"))
            page = self._at.get(path)
            return page(query) if page else not_found()
        except RequestError as error:
            return message("This cannot be shown", str(error), 400)

    def runs(self, query: Query) -> Reply:
        """Return the list, filtered."""
        seen = self._index.look()
        wanted = {name: query[name][0] for _, name in FILTERS if query.get(name) and query[name][0]}
        rows = [row for row in seen.rows if all(str(row[name]) == value for name, value in wanted.items())]
        text = (query.get("q") or [""])[0].strip().lower()
        if text:
            rows = [row for row in rows if text in f"{self._index.name_of(row)} {row['case']}".lower()]
        rows = rows[::-1]
        heads, names = shown_columns(rows)
        heads = heads[len(heads) - len(names) :]
        listed = [
            (
                self._index.name_of(row),
                row,
                [(head, *_halved(row, name)) for head, name in zip(heads, names, strict=True)],
            )
            for row in rows
        ]
        choices = [
            (title, name, sorted({str(row[name]) for row in seen.rows}), wanted.get(name, ""))
            for title, name in FILTERS
        ]
        page = fill(
            "runs.html", served=True, title="Runs", heads=heads if len(heads) <= _MOST_COLUMNS else [], rows=listed,
            choices=choices, text=text, total=len(seen.rows), problems=seen.problems, live=live_runs(seen.unfinished),
            directory=self._index.directory.name,
        )  # fmt: skip
        return Reply(page)

    def live(self, query: Query) -> Reply:
        """Return the part of a page that tells of runs in progress: of one, or of all."""
        unfinished = self._index.look().unfinished
        wanted = query.get("run")
        chosen = {name: path for name, path in unfinished.items() if not wanted or name in wanted}
        return Reply(fill("live.html", live=live_runs(chosen)))

    def run(self, name: str) -> Reply:
        """Return the page of one run, or how far it is."""
        seen = self._index.look()
        if name in seen.runs:
            return Reply(_page_of(seen.runs[name]), inline=True)
        if name in seen.unfinished:
            live = [live_run(name, seen.unfinished[name])]
            return Reply(fill("progress.html", served=True, title=name, name=name, live=live))
        return not_found()

    def compare(self, query: Query) -> Reply:
        """Compare some runs with the first."""
        from accelmark.report.comparison import render_comparison
        from accelmark.results.compare.compare import compare

        seen = self._index.look()
        names = list(dict.fromkeys(query.get("run") or ()))
        unknown = [name for name in names if name not in seen.runs]
        if unknown:
            return message("There is no such run", ", ".join(unknown), 404)
        chosen = sorted((seen.runs[name] for name in names), key=lambda run: run.summary.started_at)
        told = compare(chosen, across_scales="across" in query, force="force" in query)
        return Reply(render_comparison(told, served=True))

    def scaling(self, query: Query) -> Reply:
        """Return efficiency over scales."""
        from accelmark.results.figures.scaling import scaling_curves

        curves = scaling_curves(self._index.look().runs.values())
        shown = [(curve, scaling_chart(curve)) for curve in curves]
        return Reply(fill("scaling.html", served=True, title="Scaling", curves=shown))

    def trend(self, query: Query) -> Reply:
        """Return one figure of one case over time."""
        seen = self._index.look()
        groups = _subjects(seen)
        chosen = (query.get("of") or [next(iter(groups), "")])[0]
        figures = [name for name in FigureName if any(row[name.value] is not None for row in groups.get(chosen, ()))]
        asked = (query.get("figure") or [FigureName.THROUGHPUT_TRAIN.value])[0]
        name = next((found for found in figures if found.value == asked), figures[0] if figures else None)
        values = {"subjects": list(groups), "chosen": chosen, "figure": name.value if name else ""}
        unit = str(groups[chosen][0]["unit"]) if chosen in groups else "sample"
        choices = [(found.value, title_of(found, unit)) for found in figures]
        drawn = self._trend(groups[chosen], name, unit) if name is not None else None
        return Reply(fill("trend.html", served=True, title="Trend", choices=choices, drawn=drawn, **values))

    def _trend(self, rows: Sequence[Row], name: FigureName, unit: str) -> dict[str, object]:
        from accelmark.results.compare.trend import change_points, levels

        points = [row for row in rows if row[name.value] is not None]
        numbers = [float(row[name.value] or 0.0) for row in points]
        changes = change_points(numbers)
        segments = levels(numbers, changes)
        halves = [row[f"{name.value}{HALF}"] for row in points]
        drawn = [
            (str(row["started_at"] or NOTHING), number, float(half) if half else None)
            for row, number, half in zip(points, numbers, halves, strict=True)
        ]
        shown_unit = unit_of(name, unit)
        told = [
            (str(points[begin]["started_at"])[:16].replace("T", " "), self._index.name_of(points[begin]),
             quantity(before[2], shown_unit), quantity(level, shown_unit),
             f"{100 * (level / before[2] - 1):+.1f}\u202f%".replace("-", "−") if before[2] else NOTHING)
            for before, (begin, _, level) in itertools.pairwise(segments)
        ]  # fmt: skip
        listed = [
            (self._index.name_of(row), str(row["started_at"])[:16].replace("T", " "), figure_cell(row, name), position)
            for position, row in enumerate(points)
        ][::-1]
        chart = trend_chart(drawn, segments, shown_unit, title_of(name, unit))
        explanation = FIGURES[name].explanation
        return {"chart": chart, "changes": told, "rows": listed, "starts": changes, "explanation": explanation}

    def results_json(self, query: Query) -> Reply:
        """Return the whole table, for programs."""
        seen = self._index.look()
        rows = [row | {"path": self._index.name_of(row)} for row in seen.rows]
        return Reply(json.dumps({"results": rows, "problems": seen.problems}), "application/json")

    def metrics(self, query: Query) -> Reply:
        """Return what telemetry of the runs in progress saw last, for Prometheus."""
        from accelmark.telemetry.exposition import CONTENT_TYPE, expose

        recorders = [
            ({"run": name}, record)
            for name, path in self._index.look().unfinished.items()
            for record in sorted(path.glob("*/round*/*/telemetry.jsonl"))
            if record.resolve().is_relative_to(path)
        ]
        return Reply(expose(recorders, now_s=time.time()), CONTENT_TYPE)


def _halved(row: Row, name: FigureName) -> tuple[str, str]:
    """Return a figure and half its interval, empty where it has none."""
    value, _, half = figure_cell(row, name).partition(" ± ")
    return value, half


def _page_of(run: LoadedRun) -> str:
    """Return the page of a run or of a search, made from its records."""
    if not is_search(run.path):
        from accelmark.report.page import render_page

        return render_page(load_source(run.path))
    from accelmark.automl.controller.directory import SearchDirectory
    from accelmark.report.automl.view import search_view
    from accelmark.report.automl.write import render_search

    return render_search(search_view(SearchDirectory(run.path)))


def _subjects(seen: Seen) -> dict[str, list[Row]]:
    """Return the rows of what can be followed over time: one case, version, chip, scale and kind."""
    groups: dict[str, list[Row]] = {}
    for row in seen.rows:
        kind = [word for word in ("open", "synthetic") if word in str(row["marks"])]
        parts = [f"{row['case']} v{row['case_version']}", row["chip"], row["scale"], row["precision"], row["variant"]]
        groups.setdefault(" · ".join([*(str(part) for part in parts if part), *kind]), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])))


def message(title: str, text: str, status: int) -> Reply:
    """Return a page that says one thing."""
    return Reply(fill("message.html", served=True, title=title, text=text), status=status)


def not_found() -> Reply:
    """Return the page for what is not there."""
    return message("There is no such page", "The run may have been moved or renamed.", 404)
