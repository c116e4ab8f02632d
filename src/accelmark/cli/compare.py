"""``accelmark compare A B …``: differences between runs, with confidence intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from accelmark.cli import options
from accelmark.report.printable import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from accelmark.results.compare.comparison import Pair

_WIDE: Final = 116
"""Widest width of the full table."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="A B …", help="Runs, bundles or directories of runs; the first is the baseline."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a self-contained HTML page.")
    ] = None,
    across_scales: Annotated[
        bool, typer.Option("--across-scales", help="Compare runs on different numbers of hosts and ranks.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Compare runs that are not comparable.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare runs with the first one. Shows differences with 95 % intervals, and changed settings and software."""
    from accelmark.results.compare import comparison as comparing
    from accelmark.results.sources import open_sources

    loaded, problems = open_sources(runs)
    comparison = comparing.compare(loaded, across_scales=across_scales, force=force, problems=problems)
    if output is not None:
        from accelmark.report.comparison import render_comparison
        from accelmark.results.store.files import write_atomic

        write_atomic(output, render_comparison(comparison))
    if as_json:
        typer.echo(comparison.model_dump_json())
        return
    for problem in problems:
        typer.secho(f"warning: {printable(problem)}", fg="yellow", err=True)
    for pair in comparison.pairs:
        _print(pair)
    for line in comparison.unmatched:
        typer.echo(f"not compared: {printable(line)}")
    if output is not None:
        typer.echo(str(output))


def _print(pair: Pair) -> None:
    from rich.console import Console

    from accelmark.report.comparison import scale_of_side, summary_line
    from accelmark.results.compare.context import context_lines

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=140, highlight=False)
    for word, side in (("baseline", pair.baseline), ("compared", pair.other)):
        marks = f" ({', '.join(mark.replace('_', ' ') for mark in side.marks)})" if side.marks else ""
        console.print(_text(f"{word}: {side.run}  {side.key.model} · {scale_of_side(side)} · {side.verdict}{marks}"))
    for reason in pair.not_comparable:
        console.print(_text(f"NOT COMPARABLE: {reason}", "bold red"))
    console.print(figures_table(pair, narrow=console.width < _WIDE))
    console.print(summary_line(pair), markup=False)
    for text in context_lines(pair.differing):
        console.print(_text(f"  {text}"))
    for text in pair.one_sided:
        console.print(_text(f"  only one run has: {text}"))
    console.print()


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def figures_table(pair: Pair, *, narrow: bool) -> Table:
    """Return the figures; ``narrow``: each unit once, and half the interval instead of its bounds."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from accelmark.report.comparison import lines_of

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    table.add_column("figure", overflow="fold")
    for heading in ("baseline", "compared", *(["diff. ± 95 %"] if narrow else ["difference", "95 % interval"])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("effect", no_wrap=True)
    styles = {"better": "green", "worse": "red", "different": "yellow"}
    for line in lines_of(pair):
        effect = "one round" if line.css_class == "unknown" and narrow else line.effect
        judged = Text(effect, style=styles.get(line.css_class, "dim"))
        cells = (
            [line.bare, line.other, line.half] if narrow else [line.baseline, line.other, line.change, line.interval]
        )
        table.add_row(*map(_text, [line.title, *cells]), judged)
    return table
