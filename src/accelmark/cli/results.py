"""``accelmark results [DIR]``: all runs below a directory as one table."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from accelmark.cli import options
from accelmark.report.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from accelmark.results.compare.table import Row
    from accelmark.results.store.loaded_run import LoadedRun


_PIPE_WIDTH: Final = 260
"""Columns of output that is not a terminal."""


class Format(StrEnum):
    """Output format of a table."""

    CSV = "csv"
    PARQUET = "parquet"
    MARKDOWN = "markdown"


def results(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR …]", help="Runs, bundles, or directories that contain them. Default: runs/."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="COLUMN=VALUE", help="Filter rows, e.g. chip=H100,H200; repeat to combine with AND."
        ),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option("--group-by", metavar="COLUMN,…", help="Group rows by columns: chip, case, scale, …")
    ] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="Query the table 'results' with a SELECT (DuckDB).")] = None,
    output_format: Annotated[Format | None, typer.Option("--format", help="Output format.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")] = None,
    readme: Annotated[
        list[Path] | None,
        typer.Option("--readme", metavar="FILE", help="Update the results table in a case's README. Repeatable."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all runs and bundles as one table. Runs that cannot be read are listed."""
    from accelmark.results.compare.table import column, matching, rows_of
    from accelmark.results.sources import open_sources
    from accelmark.spec.errors import RequestError

    given = {
        "--sql": sql is not None,
        "--group-by": group_by,
        "--format": output_format,
        "--output": output,
        "--json": as_json,
    }
    _refuse_unused("--readme" if readme else None, given)
    _refuse_unused("--json" if as_json else None, {"--format": output_format})
    only_flat = output_format not in (None, Format.MARKDOWN)
    _refuse_unused(
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
        _update_readmes(readme, runs)
        return
    rows = rows_of(runs)
    if sql is not None:
        _print_query(rows, sql, output_format, output, as_json=as_json)
    elif as_json:
        _emit(json.dumps({"results": rows, "problems": problems}), output)
    elif output_format is Format.PARQUET:
        from accelmark.results.compare.sql import write_parquet

        if output is None:
            raise RequestError("--format parquet needs --output FILE")
        write_parquet(rows, output)
        typer.echo(str(output))
    elif output_format is Format.CSV:
        from accelmark.results.compare.table import COLUMNS, to_csv

        _emit(to_csv(list(COLUMNS), [[row[name] for name in COLUMNS] for row in rows]), output)
    elif output_format is Format.MARKDOWN:
        from accelmark.report.tables import markdown

        _emit(markdown(rows, groups), output)
    elif output is not None:
        raise RequestError("--output needs --format csv, parquet or markdown")
    else:
        show_rows(rows, groups)


def _assignment(text: str) -> tuple[str, str]:
    from accelmark.spec.errors import RequestError

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise RequestError(f"--where {text!r}: write COLUMN=VALUE, e.g. chip=H100")
    return name.strip(), value


def _refuse_unused(chosen: str | None, others: Mapping[str, object]) -> None:
    """Raise RequestError for options that have no effect together with ``chosen``."""
    from accelmark.spec.errors import RequestError

    unused = [name for name, value in others.items() if value]
    if chosen is not None and unused:
        raise RequestError(f"{', '.join(unused)} has no effect together with {chosen}: remove one of them")


def _update_readmes(readmes: Sequence[Path], runs: Sequence[LoadedRun]) -> None:
    """Update the results table of each README with the case of its folder; write nothing if one case has no run."""
    from accelmark.report.tables import write_readme_table
    from accelmark.spec.errors import RequestError

    found = {case.key.model for run in runs for case in run.summary.cases}
    models = {readme: readme.resolve().parent.name for readme in readmes}
    for readme, model in models.items():
        if model not in found:
            raise RequestError(f"{readme}: not changed: there is no run of {model}")
    for readme, model in models.items():
        write_readme_table(readme, runs, model)
        typer.echo(str(readme))


def _print_query(
    rows: Sequence[Row], sql: str, output_format: Format | None, output: Path | None, *, as_json: bool
) -> None:
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
        raise RequestError("the result of --sql can be written with --format csv or markdown")
    else:
        show_table(answer.columns, answer.rows)


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    from accelmark.results.store.files import write_atomic

    write_atomic(output, text if text.endswith("\n") else text + "\n")
    typer.echo(str(output))


def show_rows(rows: Sequence[Row], group_by: Sequence[str], *, console: Console | None = None) -> None:
    """Print rows with a heading for each group; two lines for each row where the table is wider than the terminal."""
    from accelmark.report.tables import group_title, shown_columns, shown_rows
    from accelmark.results.compare.table import grouped

    if not rows:
        typer.echo("no results")
        return
    console = console or _console()
    for values, part in grouped(rows, group_by).items():
        if group_by:
            typer.secho(printable(group_title(group_by, values)), bold=True)
        (heads, names), cells = shown_columns(part), shown_rows(part)
        table = _table(heads, cells)
        if _fits(console, table):
            console.print(table)
        else:
            _print_blocks(console, heads, cells, len(heads) - len(names))


def show_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; cells that do not fit are wrapped."""
    _console().print(_table(heads, rows))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_PIPE_WIDTH, highlight=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(Text(printable(head)), overflow="fold")
    for row in rows:
        table.add_row(*(Text("–" if value is None else printable(str(value))) for value in row))
    return table


def _fits(console: Console, table: Table) -> bool:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width


def _print_blocks(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], num_facts: int) -> None:
    """Print each row as one line of facts and an indented line of its figures."""
    from rich.padding import Padding
    from rich.text import Text

    from accelmark.spec.number_format import NOTHING

    for row in rows:
        shown = [printable(text) for text in row]
        facts, figures = shown[:num_facts], zip(heads[num_facts:], shown[num_facts:], strict=True)
        described = [text for text in facts[1:-1] if text != NOTHING] + [f"rounds: {facts[-1]}"]
        console.print(Text.assemble((facts[0], "bold"), "  ", "  ".join(described)))
        measured = [f"{head} {value}" for head, value in figures if value != NOTHING]
        console.print(Padding(Text(" · ".join(measured) or "no figures"), (0, 0, 0, 4)))
