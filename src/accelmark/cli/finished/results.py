"""Verbs over many runs: results, compare, view."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.help import Output
from accelmark.report.printable import printable
from accelmark.spec.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from accelmark.results.comparison import Pair
    from accelmark.results.table import Row


_PIPE_WIDTH: Final = 260
"""Columns of a table of runs in output that is not a terminal."""
_COMPARISON_WIDTH: Final = 140


Format = Literal["csv", "parquet", "markdown"]


def results(
    places: Annotated[
        list[Path] | None,
        Argument(
            metavar="DIR",
            help="Runs, bundles or directories of runs; default: runs/.",
            autocompletion=completion.results,
        ),
    ] = None,
    where: Annotated[
        list[str] | None, Option(metavar="COLUMN=VALUE", help="Filter rows, e.g. chip=H100,H200; repeat for AND.")
    ] = None,
    group_by: Annotated[
        str | None, Option(metavar="COLUMN,…", help="Group rows by columns: chip, case, scale, …")
    ] = None,
    sql: Annotated[str | None, Option("--sql", help="Query the table 'results' with a SELECT (DuckDB).")] = None,
    output_format: Annotated[Format | None, Option("--format", help="Output format.")] = None,
    output: options.Output = None,
    readme: Annotated[
        list[Path] | None, Option(metavar="FILE", help="Update the table in a case's README. Repeatable.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all runs and bundles as one table. Runs that cannot be read are listed."""
    from accelmark.results.sources import open_sources
    from accelmark.results.table import column, matching, rows_of

    given = {"--sql": sql is not None, "--group-by": group_by, "--format": output_format, "--output": output}
    _refuse_unused("--readme" if readme else None, given | {"--json": as_json})
    _refuse_unused("--json" if as_json else None, {"--format": output_format})
    only_flat = output_format not in (None, "markdown")
    flat = "--sql" if sql is not None else "--json" if as_json else "this --format" if only_flat else None
    _refuse_unused(flat, {"--group-by": group_by})
    groups = [column(name.strip()) for name in (group_by or "").split(",") if name.strip()]
    wanted = [_assignment(text) for text in where or ()]
    runs, problems = open_sources([options.existing_run(place) for place in places] if places else [Path("runs")])
    for problem in problems:
        options.warn(problem)
    runs = matching(runs, wanted)
    if wanted and not runs:
        options.warn("no result matches --where")
    if readme:
        from accelmark.report.tables import write_readme_table

        rows = {case.key.model for run in runs for case in run.summary.cases}
        models = {page: page.resolve().parent.name for page in readme}
        for page, model in models.items():
            if model not in rows:
                raise RequestError(f"{page}: not changed: there is no run of {model}")
        for page, model in models.items():
            write_readme_table(page, runs, model)
            typer.echo(str(page))
        return
    _write(rows_of(runs), problems, groups, sql, output_format, output, as_json=as_json)


def _write(
    rows: list[Row],
    problems: list[str],
    groups: list[str],
    sql: str | None,
    output_format: Format | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print or write rows, or the answer of a query on them."""
    from accelmark.report.tables import markdown, plain_markdown
    from accelmark.results.table import COLUMNS, run_query, to_csv, write_parquet

    answer = run_query(rows, sql) if sql is not None else None
    if as_json:
        content = {"results": rows, "problems": problems} if answer is None else {"results": answer.records()}
        _emit(json.dumps(content, default=str, allow_nan=False), output)
    elif output_format == "csv" and answer is None:
        _emit(to_csv(list(COLUMNS), [[row[name] for name in COLUMNS] for row in rows]), output)
    elif output_format == "csv" and answer is not None:
        _emit(to_csv(answer.columns, answer.rows), output)
    elif output_format == "markdown":
        _emit(markdown(rows, groups) if answer is None else plain_markdown(answer.columns, answer.rows), output)
    elif output_format and output is not None and answer is None:
        write_parquet(rows, output)
        typer.echo(str(output))
    elif output_format or output:
        raise RequestError("--output needs --format csv, markdown or parquet; parquet needs --output and has no --sql")
    elif answer is not None:
        _console().print(_table(answer.columns, answer.rows))
    else:
        show_rows(rows, groups)


def _assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise RequestError(f"--where {text!r}: write COLUMN=VALUE, e.g. chip=H100")
    return name.strip(), value


def _refuse_unused(chosen: str | None, others: Mapping[str, object]) -> None:
    """Raise RequestError for options that have no effect together with ``chosen``."""
    unused = [name for name, value in others.items() if value]
    if chosen is not None and unused:
        raise RequestError(f"{', '.join(unused)} has no effect together with {chosen}: remove one of them")


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    from accelmark.results.store.files import write_atomic

    write_atomic(output, text if text.endswith("\n") else text + "\n")
    typer.echo(str(output))


def show_rows(rows: Sequence[Row], group_by: Sequence[str]) -> None:
    """Print rows with a heading for each group."""
    from accelmark.report.tables import group_title, shown_columns, shown_rows
    from accelmark.results.table import grouped

    if not rows:
        typer.echo("no results")
        return
    console = _console()
    for values, part in grouped(rows, group_by).items():
        if group_by:
            typer.secho(printable(group_title(group_by, values)), bold=True)
        console.print(_table(shown_columns(part)[0], shown_rows(part)))


def _console(pipe_width: int = _PIPE_WIDTH) -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=pipe_width, highlight=False)


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


def compare(
    runs: Annotated[
        list[Path],
        Argument(
            metavar="RUN",
            help="Runs, bundles or directories of runs; the first is the baseline.",
            autocompletion=completion.results,
        ),
    ],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write a self-contained HTML page.")
    ] = None,
    across_scales: Annotated[
        bool, Option("--across-scales", help="Compare runs on different numbers of hosts and ranks.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Compare runs that are not comparable.")] = False,
    prices: options.PricesFile = None,
    as_json: options.AsJson = False,
) -> Output:
    """Compare runs with the first one. Shows differences with 95 % intervals, and changed settings and software."""
    from accelmark.report.comparison import buyer_lines, render_comparison
    from accelmark.results import comparison as comparing
    from accelmark.results.prices import read_prices
    from accelmark.results.sources import open_sources

    loaded, problems = open_sources([options.existing_run(run) for run in runs])
    costs = read_prices(prices)
    comparison = comparing.compare(loaded, across_scales=across_scales, force=force, problems=problems)
    buyer = buyer_lines(comparison, costs)
    if output is not None:
        from accelmark.results.store.files import write_atomic

        write_atomic(output, render_comparison(comparison, prices=costs))

    def show() -> None:
        for problem in problems:
            options.warn(problem)
        for line in buyer:
            options.echo_wrapped(printable(f"{line.case}, {line.chips}: faster by {line.faster}; energy {line.energy}"))
            for title, one, two in line.costs:
                options.echo_wrapped(f"  {title}: {one} and {two}")
            options.echo_wrapped(printable(f"  changed by the vendor: {line.changed}"))
        for pair in comparison.pairs:
            _print_pair(pair)
        for unmatched in comparison.unmatched:
            options.echo_wrapped(f"not compared: {printable(unmatched)}")
        if output is not None:
            typer.echo(str(output))

    content = comparison.model_dump(mode="json") | ({"buyer": [line._asdict() for line in buyer]} if buyer else {})
    return Output(content, show)


def _print_pair(pair: Pair) -> None:
    from accelmark.report.comparison import scale_of_side, summary_line
    from accelmark.results.comparison import context_lines
    from accelmark.results.schema import with_marks
    from accelmark.run.display.displays import print_hanging

    console = _console(_COMPARISON_WIDTH)
    for word, side in (("baseline", pair.baseline), ("compared", pair.other)):
        verdict = with_marks(side.verdict, side.marks)
        print_hanging(console, _text(f"{word}: {side.run}  {side.key.model} · {scale_of_side(side)} · {verdict}"))
    for reason in pair.not_comparable:
        console.print(_text(f"NOT COMPARABLE: {reason}", "bold red"))
    if pair.differences:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        from accelmark.report.comparison import lines_of

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(("figure", "baseline", "compared", "difference", "95 % interval", "effect")):
            table.add_column(heading, overflow="fold", justify="right" if 0 < number < 5 else "left")
        styles = {"better": "green", "worse": "red", "different": "yellow"}
        for line in lines_of(pair):
            cells = (line.title, line.baseline, line.other, line.change, line.interval)
            table.add_row(*map(_text, cells), Text(line.effect, style=styles.get(line.css_class, "dim")))
        console.print(table)
    console.print(summary_line(pair), markup=False)
    for text in context_lines(pair.differing):
        print_hanging(console, _text(f"  {text}"))
    for text in pair.one_sided:
        print_hanging(console, _text(f"  only one run has: {text}"))
    console.print()


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def view(
    directory: Annotated[Path, Argument(metavar="DIR", help="Directory that contains the runs.")] = Path("runs"),
    host: Annotated[str, Option(help="Address; if other machines can reach it, give --token-file.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8710,
    token_file: Annotated[
        Path | None, Option(metavar="FILE", help="File of the access token; created if missing.")
    ] = None,
) -> None:
    """Show the runs below a directory in a browser. The pages are read-only and by default for this machine only."""
    from accelmark.spec.plugins.requirements import require

    require("accelmark view", "accelmark[view]")
    from accelmark.report.view import Access, RunIndex, is_loopback, listen, make_app, read_or_create_token, server_for

    if token_file is None and not is_loopback(host):
        raise RequestError(f"{host} can be reached from other machines: name a file for the token with --token-file")
    token = read_or_create_token(token_file) if token_file else None
    app = make_app(RunIndex(directory), Access.to(host, token))
    with listen(host, port) as listener:
        # No browser can open the address that means all interfaces.
        where = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        typer.echo(f"http://{where}:{listener.getsockname()[1]}/")
        if token_file:
            typer.echo(f"The page asks for the access token, which is in {token_file}.")
        typer.echo("Press Ctrl-C to stop.")
        server_for(app).run(sockets=[listener])
