"""What verbs share: options, arguments, what they print (as JSON or by their own view), and help with examples."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from accelmark.cli import completion
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.spec.errors import EXIT_OK, Problem, RequestError, nearest
from accelmark.spec.number_format import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from accelmark.results.store.loaded_run import LoadedRun


def expanded(text: str) -> Path:
    """Return the path of an option; shells expand no ``~`` in ``--data=~/data``."""
    return Path(text).expanduser()


def option(metavar: str, text: str, *names: str, complete: completion.Completion | None = None, **more: Any) -> Any:
    """Return an option: what its help shows as its value, and its text."""
    return Option(*names, metavar=metavar, help=text, autocompletion=complete, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value."""
    return Option(name, help=text)


def argument(metavar: str, text: str, complete: completion.Completion | None = None) -> Any:
    """Return an argument: the name and the text that its help shows."""
    return Argument(metavar=metavar, help=text, autocompletion=complete)


Data = Annotated[Path | None, option("DIR", "Directory with the data sets and weights.", "--data", parser=expanded)]
Vendor = Annotated[
    str | None, Option("--vendor", help="Chip vendor; default: the one detected.", autocompletion=completion.vendors)
]
Settings = Annotated[list[str] | None, option("KEY=VALUE", "Override a setting: threads=2. Repeatable.", "--set")]
Synthetic = Annotated[bool, flag("--synthetic", "Use synthetic data; marks the result as such.")]
BadSamples = Annotated[
    int | None, option("N", "Replace up to N unreadable training samples a rank.", "--tolerate-bad-samples", min=0)
]
Open = Annotated[bool, flag("--open", "Allow changes to immutable settings; permanently marks the result OPEN.")]
Strict = Annotated[bool, flag("--strict", "Treat warnings as errors: do not start.")]
FailFast = Annotated[bool, flag("--fail-fast", "Start no further round after a failure.")]
Timeout = Annotated[float | None, Option("--timeout", min=0.001, help="Time limit of one round in seconds.")]
Out = Annotated[Path | None, option("DIR", "Run directory; default: a new one in runs/.", "--out")]
Offline = Annotated[bool, flag("--offline", "Download nothing; use cached data.")]
DryRun = Annotated[bool, flag("--dry-run", "Print hosts, rounds, data and what is missing; start nothing.")]
Commands = Annotated[bool, flag("--commands", "Print every command and setting; start nothing.")]
AsJson = Annotated[bool, flag("--json", "Print JSON.")]
OutputFile = Annotated[Path | None, option("FILE", "Write to this file.", "--output", "-o")]
PricesFile = Annotated[Path | None, option("FILE", "Your own prices (YAML); adds costs. None are shipped.", "--prices")]
RunPath = Annotated[Path, argument("RUN", "Run directory, its name in runs/, or 'latest' there.")]
LATEST: Final = Path("latest")
_MAX_RUNS: Final = 3
WIDE: Final = 110
"""Columns of a terminal from which lists have a column more; ``--json`` always has it."""


def shipped_file(given: Path, folder: str) -> Path:
    """Return ``given``, or AccelMark's own file of that name in ``folder`` (``suites``, ``searches``)."""
    own = {path.stem: path for path in (Path(__file__).parents[1] / folder).glob("*.yaml")}
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    if given.name not in own:
        raise RequestError(f"{given}: neither a file here nor one of AccelMark's {folder}; {nearest(given.name, own)}")
    return own[given.name]


def existing_run(given: Path) -> Path:
    """Return ``given``, or the run of that name in ``runs/``; for ``latest`` the newest."""
    for path in (given, Path("runs") / given):
        if path.exists():
            return path
    plans = sorted(Path("runs").glob("*/plan.json"), key=lambda plan: plan.stat().st_mtime_ns, reverse=True)
    runs = [plan.parent for plan in plans]
    if given == LATEST and runs:
        typer.echo(f"latest: {runs[0]}", err=True)
        return runs[0]
    if given == LATEST:
        raise RequestError("there is no run in runs/; name its directory")
    runs.sort(key=lambda run: given.name not in run.name)
    listed = f"; in runs/: {', '.join(run.name for run in runs[:_MAX_RUNS])}" if runs else ""
    raise RequestError(f"{given}: no such run directory or bundle{listed}")


def own_run(given: Path) -> Path:
    """Return what :func:`existing_run` does, for a verb that does not read searches."""
    from accelmark.results.rounds.search import is_search

    run = existing_run(given)
    if is_search(run):
        raise RequestError(f"{run}: is a search; use 'accelmark automl' (status, stop, resume, report, verify)")
    return run


def opened_runs(places: Sequence[Path]) -> list[LoadedRun]:
    """Return the runs in directories; warn of those that cannot be read."""
    from accelmark.results.sources import open_sources

    runs, problems = open_sources(places)
    for problem in problems:
        warn(problem)
    return runs


def write_new(texts: Mapping[str, str], directory: Path, option: str, *, force: bool) -> list[str]:
    """Write files to the directory of ``option``, without ``force`` only new ones; return their paths."""
    if (taken := [name for name in texts if (directory / name).exists()]) and not force:
        what = f"{directory}: files exist: {', '.join(taken)}"
        raise RequestError(f"{what}; use --force to overwrite them, or another {option}")
    for name, text in texts.items():
        make_directory((directory / name).parent)
        write_atomic(directory / name, text)
    return [str(directory / name) for name in texts]


def warn(text: str) -> None:
    """Print a warning to stderr."""
    echo_error(f"warning: {printable(text)}", fg="yellow")


def echo_error(text: str, fg: str | None = None) -> None:
    """Print lines to stderr."""
    typer.secho(text, fg=fg, err=True)


def rich_console(*, stderr: bool = False, highlight: bool = False, width: int | None = None) -> Console:
    """Return a console of rich, which takes long to import."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=highlight, width=width)


def plain_table(*headings: str, fixed: int = 0) -> Table:
    """Return an empty table without borders; cells wrap, except in the first ``fixed`` columns."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=number < fixed)
    return table


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fixed: int = 0) -> None:
    """Print a table without borders; cells wrap, except in the first ``fixed`` columns."""
    table = plain_table(*headings, fixed=fixed)
    for row in rows:
        table.add_row(*row)
    rich_console().print(table)


def setting_text(value: Any) -> str:
    """Return a setting's value as YAML has it; null is a dash."""
    return "-" if value is None else json.dumps(value) if isinstance(value, dict | list | tuple | bool) else str(value)


def echo_wrapped(line: str, fg: str | None = None) -> None:
    """Print a line of prose, on a terminal wrapped between words to its width."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    typer.secho(line, fg=fg)


@contextmanager
def working(doing: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal (stderr) that a step is in progress; yields a function that prints a line above it."""
    console = rich_console(stderr=True)
    with console.status(f"{doing} …"):
        yield lambda line: console.print(line, markup=False)


@contextmanager
def host_problems_printed(*, as_json: bool) -> Iterator[None]:
    """Where hosts are not ready, print all their problems and exit; with ``as_json`` raise the error."""
    from accelmark.run.preflight.checks import HostsNotReadyError

    try:
        yield
    except HostsNotReadyError as error:
        if as_json:
            raise
        typer.secho("error: hosts are not ready", fg="red", err=True)
        print_problems(error.all_problems, strict=error.strict)
        raise typer.Exit(error.exit_code) from error


def print_problems(problems: Sequence[Problem], *, strict: bool = False) -> None:
    """Print problems with their hosts and what to do, errors first."""
    from accelmark.run.preflight.checks import grouped

    for problem in sorted(grouped(problems), key=lambda problem: problem.severity):
        kind, color = ("warning", "yellow") if problem.severity == "warning" and not strict else ("error", "red")
        echo_error(f"{kind}: {printable(f'{problem.where}: {problem.what}')}", fg=color)
        echo_error(f"  what to do: {printable(problem.hint)}")


class Output(NamedTuple):
    """The result of a verb, which :class:`Verb` prints."""

    content: Any
    """A pydantic model, or a JSON value that may contain models; printed with ``--json``."""
    show: Callable[[], None]
    """Prints the content for people."""
    exit_code: int = EXIT_OK


_EXAMPLES: Final = Path(__file__).with_name("examples.yaml")
_VALUES: Final = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
_TYPE: Final = re.compile(r"<(?:list\[)?([^<>\]]*?)(?: range)?\]?>")


def examples() -> Mapping[str, Sequence[str]]:
    """Return, for each verb, the commands that its help shows."""
    import yaml

    commands: Mapping[str, Sequence[str]] = yaml.safe_load(_EXAMPLES.read_text(encoding="utf-8"))
    return commands


class Verb(TyperCommand):
    """A verb whose help shows its examples. An :class:`Output` that it returns is printed, as JSON with ``--json``."""

    def invoke(self, ctx: Any) -> Any:
        """Call the verb and print its output."""
        output = super().invoke(ctx)
        if isinstance(output, Output) and ctx.params.get("as_json"):
            from pydantic_core import to_json

            typer.echo(to_json(output.content).decode())
        elif isinstance(output, Output):
            output.show()
        if isinstance(output, Output) and output.exit_code != EXIT_OK:
            raise typer.Exit(output.exit_code)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line with required arguments as ``KEY``, not ``{KEY}``."""
        return [re.sub(r"\{(.+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; only options show the kind of their value."""
        sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_option = parameter.param_type_name == "option"
                shown = (lambda kind: _VALUES.get(kind[1], kind[1])) if is_option else ""
                name = _TYPE.sub(shown, record[0])
                sections[parameter.param_type_name].append((name.strip(), record[1].removesuffix("  [required]")))
        for title, rows in (("Arguments", sections["argument"]), ("Options", sections["option"])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line."""
        verb = ctx.command_path.partition("accelmark ")[2]
        with formatter.section("Examples"):
            for line in examples()[verb]:
                formatter.write(f"  {line}\n")


def group(name: str, text: str) -> typer.Typer:
    """Return an application for verbs below the verb ``name``."""
    return typer.Typer(name=name, cls=Verbs, help=text, no_args_is_help=True, rich_markup_mode=None)


class Verbs(TyperGroup):
    """A group of verbs, listed with their whole first sentence."""

    titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Title -> names of the verbs below it; by default one title for all."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the verbs with their first sentence."""
        for title, names in (self.titles or {"Commands": tuple(self.list_commands(ctx))}).items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])
