"""The page of a run: one self-contained HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from accelmark.report.case_view import case_views
from accelmark.report.inference import inference_view
from accelmark.report.templating import embed_json, fill, inline, plotly
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.store.manifest import update_manifest

REPORT_FILE = "report.html"


def render_page(run: LoadedRun) -> str:
    """Return the page of a run as HTML; all values in it are escaped."""
    from accelmark.report.charts import scaling_chart
    from accelmark.results.figures.scaling import scaling_curves

    cases = case_views(run)
    return fill(
        "run.html",
        run=run,
        summary=run.summary,
        cases=cases,
        inference=inference_view(run),
        scaling=[(curve, scaling_chart(curve)) for curve in scaling_curves([run])],
        style=inline("page.css"),
        script=inline("run.js"),
        plotly=plotly(),
        data=embed_json({case.anchor: case.plots for case in cases}),
    )


def write_page(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a run that has a summary, by default as ``report.html`` in its directory; return its path.

    Raises RunError if the run cannot be read, or the page cannot be written.
    """
    path = output or run_dir / REPORT_FILE
    write_atomic(path, render_page(load_run(run_dir)))
    if path.resolve().is_relative_to(run_dir.resolve()):
        update_manifest(run_dir, path.resolve().relative_to(run_dir.resolve()).as_posix())
    return path
