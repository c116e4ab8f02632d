"""The table of many runs on a terminal: as a table where it fits, else two lines for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from accelmark.report.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from accelmark.results.compare.table import Row

_PIPED: Final = 260
"""Columns where the output is no terminal: a file or a pipe has room."""


def show_rows(rows: Sequence[Row], group_by: Sequence[str], *, console: Console | None = None) -> None:
    """Print rows of results, a heading for each group; on ``console`` or the terminal."""
    from accelmark.report.tables import group_title, shown_columns, shown_rows
    from accelmark.results.compare.table import grouped

    if not rows:
        typer.echo("no result")
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
    """Print any table; cells that do not fit are folded."""
    _console().print(_table(heads, rows))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_PIPED, highlight=False)


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
    """Print each row as its facts and, indented, the figures that it has."""
    from rich.padding import Padding
    from rich.text import Text

    from accelmark.spec.number_format import NOTHING

    for row in rows:
        shown = [printable(text) for text in row]
        facts, figures = shown[:num_facts], zip(heads[num_facts:], shown[num_facts:], strict=True)
        told = [text for text in facts[1:-1] if text != NOTHING] + [f"rounds: {facts[-1]}"]
        console.print(Text.assemble((facts[0], "bold"), "  ", "  ".join(told)))
        measured = [f"{head} {value}" for head, value in figures if value != NOTHING]
        console.print(Padding(Text(" · ".join(measured) or "no figure"), (0, 0, 0, 4)))
