"""The page of a run: one HTML file with everything in it, that opens without a network."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from accelmark.report.inference import inference_view
from accelmark.report.shell import fill, inline
from accelmark.report.view import case_views
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.store.manifest import update_manifest

REPORT_FILE = "report.html"


def render_page(run: LoadedRun) -> str:
    """Return the whole page of a run as HTML; every text in it that came from outside is escaped."""
    from markupsafe import Markup

    from accelmark.report.charts import scaling_chart
    from accelmark.results.figures.scaling import scaling_curves

    cases = case_views(run)
    return fill(
        "page.html",
        run=run,
        summary=run.summary,
        cases=cases,
        inference=inference_view(run),
        scaling=[(curve, scaling_chart(curve)) for curve in scaling_curves([run])],
        style=inline("page.css"),
        script=inline("page.js"),
        plotly=Markup(_plotly()),  # noqa: S704 - the library as it was packaged
        data=Markup(script_json({case.anchor: case.plots for case in cases})),  # noqa: S704 - escaped for scripts
    )


def write_page(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a summarised run, ``report.html`` in its directory unless told otherwise; return its path.

    Raises:
        RunError: the run cannot be read, or the page cannot be written.
    """
    path = output or run_dir / REPORT_FILE
    write_atomic(path, render_page(load_run(run_dir)))
    if path.resolve().is_relative_to(run_dir.resolve()):
        update_manifest(run_dir, path.resolve().relative_to(run_dir.resolve()).as_posix())
    return path


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
