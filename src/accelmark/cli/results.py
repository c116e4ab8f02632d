"""``accelmark results [DIR]``: every run below a directory as one table."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelmark.cli import options
from accelmark.cli.results_screen import show_rows, show_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelmark.results.compare.table import Row
    from accelmark.results.store.loaded_run import LoadedRun


class Format(StrEnum):
    """How a table is written."""

    CSV = "csv"
    PARQUET = "parquet"
    MARKDOWN = "markdown"


def results(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR …]", help="Directories of runs, runs, bundles; else runs/.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="COLUMN=VALUE", help="Only these, e.g. chip=H100,H200; all of several."),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option("--group-by", metavar="COLUMN,…", help="Group by columns: chip, case, scale, …")
    ] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="A SELECT over the table 'results'; DuckDB's SQL.")] = None,
    output_format: Annotated[Format | None, typer.Option("--format", help="How to write the table.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it here.")] = None,
    readme: Annotated[
        list[Path] | None,
        typer.Option("--readme", metavar="FILE", help="Renew the table of results in a case's README; again for more."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all runs and bundles below directories as one table; those that cannot be read are named."""
    from accelmark.report.printable import printable
    from accelmark.results.compare.table import column, matching, rows_of
    from accelmark.results.store.sources import open_sources
    from accelmark.spec.errors import RequestError

    asked = {
        "--sql": sql is not None,
        "--group-by": group_by,
        "--format": output_format,
        "--output": output,
        "--json": as_json,
    }
    _refuse_idle("--readme" if readme else None, asked)
    _refuse_idle("--json" if as_json else None, {"--format": output_format})
    only_flat = output_format not in (None, Format.MARKDOWN)
    _refuse_idle(
        "--sql" if sql is not None else "--json" if as_json else "this --format" if only_flat else None,
        {"--group-by": group_by},
    )
    groups = [column(name.strip()) for name in (group_by or "").split(",") if name.strip()]
    wanted = [_assignment(text) for text in where or ()]
    runs, problems = open_sources(places or [Path("runs")])
    for problem in problems:
        typer.secho(f"warning: {printable(problem)}", fg="yellow", err=True)
    runs = matching(runs, wanted)
    if readme:
        _renew(readme, runs)
        return
    rows = rows_of(runs)
    if sql is not None:
        _answer(rows, sql, output_format, output, as_json=as_json)
    elif as_json:
        _emit(json.dumps({"results": rows, "problems": problems}), output)
    elif output_format is Format.PARQUET:
        from accelmark.results.compare.sql import write_parquet

        if output is None:
            raise RequestError("Parquet is not for a terminal: name a file with --output")
        write_parquet(rows, output)
        typer.echo(str(output))
    elif output_format is Format.CSV:
        from accelmark.results.compare.table import COLUMNS, to_csv

        _emit(to_csv(list(COLUMNS), [[row[name] for name in COLUMNS] for row in rows]), output)
    elif output_format is Format.MARKDOWN:
        from accelmark.report.tables import markdown

        _emit(markdown(rows, groups), output)
    elif output is not None:
        raise RequestError("name what to write with --format csv, parquet or markdown")
    else:
        show_rows(rows, groups)


def _assignment(text: str) -> tuple[str, str]:
    from accelmark.spec.errors import RequestError

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise RequestError(f"--where {text!r}: write COLUMN=VALUE, e.g. chip=H100")
    return name.strip(), value


def _refuse_idle(chosen: str | None, others: Mapping[str, object]) -> None:
    """Refuse options that ``chosen`` leaves without an effect, rather than let them seem to have had one."""
    from accelmark.spec.errors import RequestError

    idle = [name for name, value in others.items() if value]
    if chosen is not None and idle:
        raise RequestError(f"{', '.join(idle)} does nothing together with {chosen}: leave one of them out")


def _renew(readmes: Sequence[Path], runs: Sequence[LoadedRun]) -> None:
    """Write the results of the case whose folder each README lies in; all are looked for before any is written."""
    from accelmark.report.tables import write_readme_table
    from accelmark.spec.errors import RequestError

    found = {case.key.model for run in runs for case in run.summary.cases}
    models = {readme: readme.resolve().parent.name for readme in readmes}
    for readme, model in models.items():
        if model not in found:
            raise RequestError(f"{readme}: no run of {model} was found, so that its table stays as it is")
    for readme, model in models.items():
        write_readme_table(readme, runs, model)
        typer.echo(str(readme))


def _answer(rows: Sequence[Row], sql: str, output_format: Format | None, output: Path | None, *, as_json: bool) -> None:
    from accelmark.results.compare.sql import run_query
    from accelmark.spec.errors import RequestError

    answer = run_query(rows, sql)
    if as_json:
        _emit(json.dumps({"results": answer.records()}, default=str, allow_nan=False), output)
    elif output_format is Format.CSV:
        from accelmark.results.compare.table import to_csv

        _emit(to_csv(answer.columns, answer.rows), output)
    elif output_format is Format.MARKDOWN:
        from accelmark.report.tables import plain_markdown

        _emit(plain_markdown(answer.columns, answer.rows), output)
    elif output_format is Format.PARQUET or output is not None:
        raise RequestError("the answer to SQL is written as CSV or Markdown: --format csv or markdown")
    else:
        show_table(answer.columns, answer.rows)


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    from accelmark.results.store.files import write_atomic

    write_atomic(output, text if text.endswith("\n") else text + "\n")
    typer.echo(str(output))
