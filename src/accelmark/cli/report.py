"""``accelmark report RUN``: the page of a run, from what is in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page here instead.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute every figure anew from events and telemetry.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown too.")] = False,
    mllog: Annotated[
        bool, typer.Option("--mllog", help="Write MLCommons' log lines (mllog.log) beside each training round too.")
    ] = False,
    mllog_as: Annotated[
        str | None,
        typer.Option("--mllog-as", metavar="BENCHMARK", help="MLPerf's benchmark to name in them, for its checker."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the page of a run; one that was killed before its summary is summarised first."""
    from accelmark.report.run_page import write_page
    from accelmark.results.store.loaded_run import SUMMARY_FILE, load_run
    from accelmark.run.record.measure import measure_run
    from accelmark.spec.errors import RequestError

    if not run.is_dir():
        raise RequestError(f"{run}: there is no such directory; name the directory of a run")
    if recompute or not (run / SUMMARY_FILE).is_file():
        measure_run(run, recompute=recompute)
    if mllog or mllog_as is not None:
        from accelmark.results.export.mllog import write_mllog

        write_mllog(run, benchmark=mllog_as)
    page = write_page(run, output)
    loaded = load_run(run)
    if as_json:
        problems = [*loaded.summary.problems, *loaded.problems]
        told = {"page": str(page), "problems": problems, "summary": loaded.summary.model_dump(mode="json")}
        typer.echo(json.dumps(told))
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
