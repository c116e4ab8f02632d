"""The pages: list of runs, one run, live progress, comparison, scaling, trend; and their data as JSON and metrics."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from accelmark.report.charts import scaling_chart, trend_chart
from accelmark.report.tables import figure_cell, shown_columns
from accelmark.report.templating import fill
from accelmark.report.view.index import RunIndex, Snapshot, live_run, live_runs
from accelmark.results.compare.table import HALF, Row
from accelmark.results.figure_names import FigureName, title_of, unit_of
from accelmark.results.rounds.search import is_search
from accelmark.results.sources import load_source
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.number_format import NOTHING, quantity, signed_percent

FILTERS: Final = (("Case", "case"), ("Chip", "chip"), ("Scale", "scale"), ("Verdict", "verdict"))
_MAX_COLUMNS: Final = 4
"""Figures that get a column each; more, as of different tasks, share one column and show their titles."""
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_INLINE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""For the self-contained page of a run, rendered here with all values escaped: it may send no request."""


def respond(body: str, kind: str = "text/html", status: int = 200, *, inline: bool = False) -> Response:
    """Return a response with the security headers; ``inline`` for a page that contains its scripts and styles."""
    policy = {"Content-Security-Policy": _INLINE_POLICY if inline else _POLICY} if kind == "text/html" else {}
    return Response(body, status, _HEADERS | policy, kind)


def message(title: str, text: str, status: int) -> Response:
    """Return a page with a title and a text."""
    return respond(fill("message.html", served=True, title=title, text=text), status=status)


@final
class Pages:
    """All pages over the runs of one index."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self.endpoints: dict[str, Callable[[Request], Response]] = {
            "/": self.runs, "/live": self.live, "/compare": self.compare, "/scaling": self.scaling,
            "/trend": self.trend, "/results.json": self.results_json, "/metrics": self.metrics,
        }  # fmt: skip

    def runs(self, request: Request) -> Response:
        """Return the list of runs, filtered."""
        snapshot, query = self._index.snapshot(), request.query_params
        wanted = {name: query[name] for _, name in FILTERS if query.get(name)}
        rows = [row for row in snapshot.rows if all(str(row[name]) == value for name, value in wanted.items())]
        text = query.get("q", "").strip().lower()
        if text:
            rows = [row for row in rows if text in f"{self._index.name_of(row)} {row['case']}".lower()]
        rows = rows[::-1]
        heads, names = shown_columns(rows)
        heads = heads[len(heads) - len(names) :]
        # A figure and half its interval are shown on two lines.
        cells = [
            [(head, *figure_cell(row, name).partition(" ± ")[::2]) for head, name in zip(heads, names, strict=True)]
            for row in rows
        ]
        choices = [
            (title, name, sorted({str(row[name]) for row in snapshot.rows}), wanted.get(name, ""))
            for title, name in FILTERS
        ]
        page = fill(
            "runs/runs.html", served=True, title="Runs", heads=heads if len(heads) <= _MAX_COLUMNS else [],
            rows=[(self._index.name_of(row), row, shown) for row, shown in zip(rows, cells, strict=True)],
            choices=choices, text=text, total=len(snapshot.rows), problems=snapshot.problems,
            live=live_runs(snapshot.unfinished), directory=self._index.directory.name,
        )  # fmt: skip
        return respond(page)

    def live(self, request: Request) -> Response:
        """Return the progress of one run or of all runs in progress, as a part of a page."""
        unfinished = self._index.snapshot().unfinished
        wanted = request.query_params.getlist("run")
        chosen = {name: path for name, path in unfinished.items() if not wanted or name in wanted}
        return respond(fill("run/live.html", live=live_runs(chosen)))

    def run(self, request: Request) -> Response:
        """Return the page of one run, or its progress until it ends."""
        name, snapshot = request.path_params["name"], self._index.snapshot()
        if name in snapshot.runs:
            return respond(_run_page(snapshot.runs[name]), inline=True)
        if name in snapshot.unfinished:
            live = [live_run(name, snapshot.unfinished[name])]
            return respond(fill("run/progress.html", served=True, title=name, name=name, live=live))
        raise HTTPException(404)

    def compare(self, request: Request) -> Response:
        """Compare the chosen runs with the oldest of them."""
        from accelmark.report.comparison import render_comparison
        from accelmark.results.compare.comparison import compare

        snapshot, query = self._index.snapshot(), request.query_params
        names = list(dict.fromkeys(query.getlist("run")))
        unknown = [name for name in names if name not in snapshot.runs]
        if unknown:
            return message("No such run", ", ".join(unknown), 404)
        chosen = sorted((snapshot.runs[name] for name in names), key=lambda run: run.summary.started_at)
        boxes = ("'across scales'", "'even if not comparable'")
        comparison = compare(chosen, across_scales="across" in query, force="force" in query, options=boxes)
        return respond(render_comparison(comparison, served=True))

    def scaling(self, request: Request) -> Response:
        """Return scaling efficiency over numbers of ranks."""
        from accelmark.results.figures.scaling import scaling_curves

        curves = scaling_curves(self._index.snapshot().runs.values())
        shown = [(curve, scaling_chart(curve)) for curve in curves]
        return respond(fill("runs/scaling.html", served=True, title="Scaling", curves=shown))

    def trend(self, request: Request) -> Response:
        """Return one figure of one case over time."""
        groups, query = _cases_over_time(self._index.snapshot()), request.query_params
        chosen = query.get("of", next(iter(groups), ""))
        rows = groups.get(chosen, [])
        unit = str(rows[0]["unit"]) if rows else "sample"
        figures = [name for name in FigureName if any(row[name.value] is not None for row in rows)]
        wanted = query.get("figure", FigureName.THROUGHPUT_TRAIN.value)
        name = next((found for found in figures if found.value == wanted), figures[0] if figures else None)
        page = fill(
            "runs/trend.html", served=True, title="Trend", cases=list(groups), chosen=chosen,
            figure=name.value if name else "", choices=[(found.value, title_of(found, unit)) for found in figures],
            drawn=self._trend([row for row in rows if row[name.value] is not None], name, unit) if name else None,
        )  # fmt: skip
        return respond(page)

    def _trend(self, rows: Sequence[Row], name: FigureName, unit: str) -> dict[str, object]:
        from accelmark.results.compare.statistics import change_points, levels

        numbers = [float(row[name.value] or 0.0) for row in rows]
        changes = change_points(numbers)
        segments, shown_unit = levels(numbers, changes), unit_of(name, unit)
        halves = (row[f"{name.value}{HALF}"] for row in rows)
        points = [
            (str(row["started_at"] or NOTHING), number, float(half) if half else None)
            for row, number, half in zip(rows, numbers, halves, strict=True)
        ]
        shifts = [
            (_minute(rows[begin]), self._index.name_of(rows[begin]), quantity(before, shown_unit),
             quantity(level, shown_unit), signed_percent(level / before - 1) if before else NOTHING)
            for (_, _, before), (begin, _, level) in itertools.pairwise(segments)
        ]  # fmt: skip
        listed = [
            (self._index.name_of(row), _minute(row), figure_cell(row, name), position)
            for position, row in enumerate(rows)
        ]
        chart = trend_chart(points, segments, shown_unit, title_of(name, unit))
        return {"chart": chart, "changes": shifts, "rows": listed[::-1], "starts": changes}

    def results_json(self, request: Request) -> Response:
        """Return the whole table as JSON."""
        snapshot = self._index.snapshot()
        rows = [row | {"path": self._index.name_of(row)} for row in snapshot.rows]
        return respond(json.dumps({"results": rows, "problems": snapshot.problems}), "application/json")

    def metrics(self, request: Request) -> Response:
        """Return the latest telemetry of the runs in progress in Prometheus' text format."""
        from accelmark.telemetry.exposition import CONTENT_TYPE, expose

        recorders = [
            ({"run": name}, record)
            for name, path in self._index.snapshot().unfinished.items()
            for record in sorted(path.glob("*/round*/*/telemetry.jsonl"))
            if record.resolve().is_relative_to(path)
        ]
        return respond(expose(recorders, now_s=time.time()), CONTENT_TYPE)


def _minute(row: Row) -> str:
    return str(row["started_at"])[:16].replace("T", " ")


def _run_page(run: LoadedRun) -> str:
    """Return the page of a run or of a search, rendered from its records."""
    if not is_search(run.path):
        from accelmark.report.run_page import render_page

        return render_page(load_source(run.path))
    from accelmark.automl.controller.journal import SearchDirectory
    from accelmark.report.search_page import render_search

    return render_search(SearchDirectory(run.path))


def _cases_over_time(snapshot: Snapshot) -> dict[str, list[Row]]:
    """Return the rows of each case, version, chip, scale and kind, which can be compared over time."""
    groups: dict[str, list[Row]] = {}
    for row in snapshot.rows:
        kind = [word for word in ("open", "synthetic") if word in str(row["marks"])]
        parts = [f"{row['case']} v{row['case_version']}", row["chip"], row["scale"], row["precision"], row["variant"]]
        groups.setdefault(" · ".join([*(str(part) for part in parts if part), *kind]), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])))
