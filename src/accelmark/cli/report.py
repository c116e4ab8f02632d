"""``accelmark report RUN``: write the report page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def report(
    run: options.RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute all figures from events and telemetry.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Also print the results as a Markdown table.")] = False,
    mllog: Annotated[
        bool, typer.Option("--mllog", help="Also write MLPerf log lines (mllog.log) for each training round.")
    ] = False,
    mllog_as: Annotated[
        str | None,
        typer.Option(
            "--mllog-as", metavar="BENCHMARK", help="MLPerf benchmark name for these lines, as its checker expects."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Write the report page of a run. A run without a summary is summarised first."""
    from accelmark.report.run_page import write_page
    from accelmark.results.store.loaded_run import SUMMARY_FILE, load_run
    from accelmark.run.record.measure import measure_run
    from accelmark.spec.errors import RequestError

    if not run.is_dir():
        raise RequestError(f"{run}: no such run directory")
    if recompute or not (run / SUMMARY_FILE).is_file():
        measure_run(run, recompute=recompute)
    if mllog or mllog_as is not None:
        from accelmark.results.export.mllog import write_mllog

        write_mllog(run, benchmark=mllog_as)
    page = write_page(run, output)
    loaded = load_run(run)
    if as_json:
        problems = [*loaded.summary.problems, *loaded.problems]
        content = {"page": str(page), "problems": problems, "summary": loaded.summary.model_dump(mode="json")}
        typer.echo(json.dumps(content))
    else:
        if markdown:
            from accelmark.report.tables import results_table

            typer.echo(results_table([loaded]))
        for problem in loaded.problems:
            typer.secho(f"warning: {problem}", fg="yellow", err=True)
        typer.echo(str(page))
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
