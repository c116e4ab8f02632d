"""``accelmark results [DIR]``: every run below a directory as one table."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelmark.results.store import LoadedRun
    from accelmark.results.table import Row


class Format(StrEnum):
    """How a table is written."""

    CSV = "csv"
    PARQUET = "parquet"
    MARKDOWN = "markdown"


def results(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the runs are.")] = Path("runs"),
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="COLUMN=VALUE", help="Only these, e.g. chip=H100,H200.")
    ] = None,
    group_by: Annotated[
        str | None, typer.Option("--group-by", metavar="COLUMN,…", help="Group by columns: chip, case, scale, …")
    ] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="A SELECT over the table 'results'; DuckDB's SQL.")] = None,
    output_format: Annotated[Format | None, typer.Option("--format", help="How to write the table.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it here.")] = None,
    readme: Annotated[
        Path | None, typer.Option("--readme", metavar="FILE", help="Renew the table of results in a case's README.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all runs below a directory as one table; a run that cannot be read is named, the others still show."""
    from accelmark.results.sources import open_sources
    from accelmark.results.table import filtered, rows_of
    from accelmark.spec.errors import RequestError

    runs, problems = open_sources([directory])
    for problem in problems:
        typer.secho(f"warning: {problem}", fg="yellow", err=True)
    if readme is not None:
        _renew(readme, runs)
        return
    wanted = dict(_assignment(text) for text in where or ())
    rows = filtered(rows_of(runs), wanted)
    if sql is not None:
        _answer(rows, sql, output_format, output, as_json=as_json)
    elif as_json:
        _emit(json.dumps({"results": rows, "problems": problems}), output)
    elif output_format is Format.PARQUET:
        from accelmark.results.query import write_parquet

        if output is None:
            raise RequestError("Parquet is not for a terminal: name a file with --output")
        write_parquet(rows, output)
        typer.echo(str(output))
    elif output_format is Format.CSV:
        from accelmark.results.table import COLUMNS, to_csv

        _emit(to_csv(list(COLUMNS), [[row[name] for name in COLUMNS] for row in rows]), output)
    elif output_format is Format.MARKDOWN:
        from accelmark.report.runs_table import markdown

        _emit(markdown(rows, _columns(group_by)), output)
    elif output is not None:
        raise RequestError("name what to write with --format csv, parquet or markdown")
    else:
        _print(rows, _columns(group_by))


def _assignment(text: str) -> tuple[str, str]:
    from accelmark.spec.errors import RequestError

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise RequestError(f"--where {text!r}: write COLUMN=VALUE, e.g. chip=H100")
    return name.strip(), value


def _columns(group_by: str | None) -> list[str]:
    return [name.strip() for name in group_by.split(",") if name.strip()] if group_by else []


def _renew(readme: Path, runs: Sequence[LoadedRun]) -> None:
    """Write the results of the case whose folder a README lies in."""
    from accelmark.report.markdown import write_readme_table
    from accelmark.spec.errors import RequestError

    model = readme.resolve().parent.name
    if not any(case.key.model == model for run in runs for case in run.summary.cases):
        raise RequestError(f"{readme}: no run of {model} was found, so that its table stays as it is")
    write_readme_table(readme, runs, model)
    typer.echo(str(readme))


def _answer(rows: Sequence[Row], sql: str, output_format: Format | None, output: Path | None, *, as_json: bool) -> None:
    from accelmark.results.query import ask
    from accelmark.spec.errors import RequestError

    answer = ask(rows, sql)
    if as_json:
        found = [dict(zip(answer.heads, row, strict=True)) for row in answer.rows]
        _emit(json.dumps({"results": found}, default=str), output)
    elif output_format is Format.CSV:
        from accelmark.results.table import to_csv

        _emit(to_csv(answer.heads, answer.rows), output)
    elif output_format is Format.MARKDOWN:
        from accelmark.report.runs_table import plain_markdown

        _emit(plain_markdown(answer.heads, answer.rows), output)
    elif output_format is Format.PARQUET or output is not None:
        raise RequestError("the answer to SQL is written as CSV or Markdown: --format csv or markdown")
    else:
        _show(answer.heads, answer.rows)


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    from accelmark.results.files import write_atomic

    write_atomic(output, text if text.endswith("\n") else text + "\n")
    typer.echo(str(output))


def _print(rows: Sequence[Row], group_by: Sequence[str]) -> None:
    from accelmark.report.runs_table import group_title, shown_columns, shown_row
    from accelmark.results.table import grouped

    if not rows:
        typer.echo("no result")
        return
    heads, names = shown_columns(rows)
    for values, part in grouped(rows, group_by).items():
        if group_by:
            typer.secho(group_title(group_by, values), bold=True)
        _show(heads, [shown_row(row, names) for row in part])


def _show(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text("–" if value is None else str(value)) for value in row))
    console = Console()
    (console if console.is_terminal else Console(width=240)).print(table)
