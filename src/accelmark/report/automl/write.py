"""Write a search's report: report.html, report.json, report.csv, trials.csv."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from accelmark.automl.controller.directory import SearchDirectory
from accelmark.report.automl.view import SearchView, search_view
from accelmark.report.page import script_json
from accelmark.results.store.files import write_atomic

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
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("accelmark.report.automl", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (files("accelmark.report") / "page" / "page.css").read_text(encoding="utf-8")
    own = files("accelmark.report.automl") / "page"
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return environment.get_template("search.html").render(
        view=view,
        summary=view.summary,
        headings=TRIAL_HEADINGS,
        style=Markup(style + (own / "search.css").read_text(encoding="utf-8")),  # noqa: S704 - our own files
        script=Markup((own / "search.js").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        plotly=Markup(plotly),  # noqa: S704 - the library as it was packaged
        data=Markup(script_json(view.plots)),  # noqa: S704 - escaped for scripts
        family=Markup(view.family),  # noqa: S704 - drawn here, texts escaped
        workers=Markup(view.workers),  # noqa: S704 - drawn here, texts escaped
        drawings={one.id: Markup(one.drawing) for one in view.networks},  # noqa: S704 - drawn here, texts escaped
    )


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
