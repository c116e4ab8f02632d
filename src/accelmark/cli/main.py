"""The command-line application: verbs, error messages and exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, cast

import typer

import accelmark
from accelmark.cli import options
from accelmark.cli.acceptance import accept, demo, reproduce
from accelmark.cli.automl import app as automl
from accelmark.cli.data import app as data
from accelmark.cli.folders import cases, check, explain, import_files, init, new
from accelmark.cli.ledger import app as ledger
from accelmark.cli.machine import doctor, env, monitor, preflight, probe, vendors
from accelmark.cli.options import Verb, Verbs
from accelmark.cli.results import bundle, compare, evaluate, export, report, results, verify, view
from accelmark.cli.runs import cluster, infer, resume, run, serve, status, stop, train
from accelmark.spec.errors import EXIT_CANCELLED, AccelmarkError, SpecError
from accelmark.spec.number_format import printable

_GROUPS: Final[Mapping[str, tuple[Callable[..., object], ...]]] = {
    "Measure": (train, infer, serve, run, reproduce, probe, cluster),
    "Follow a run": (status, stop, resume),
    "Read results": (report, compare, results, view, verify, evaluate, accept, bundle, export),
    "Look up": (cases, vendors, doctor, preflight, explain),
    "Write and check files": (init, new, check, import_files, monitor),
}
_USAGE_ERRORS: Final = cast("tuple[type[Exception], ...]", typer.BadParameter.__bases__)
"""Wrong arguments and options, whose class typer does not export."""


class _GroupedVerbs(Verbs):
    titles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{title: tuple(verb.__name__.removesuffix("_files") for verb in verbs) for title, verbs in _GROUPS.items()},
        "Publish results": ("ledger", "demo"),
        "Search networks": ("automl",),
        "Install frameworks": ("env",),
        "Prepare data": ("data",),
    }


app = typer.Typer(
    cls=_GroupedVerbs,
    name="accelmark",
    help="Benchmark AI chips with their software stack.\n\nStart: accelmark run quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for _verb in (verb for verbs in _GROUPS.values() for verb in verbs):
    app.command(_verb.__name__.removesuffix("_files"), cls=Verb)(_verb)
for _group in (automl, ledger, demo, data, env):
    app.add_typer(_group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"accelmark {accelmark.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Benchmark AI chips with their software stack."""


def main() -> None:
    """Run the command line; an :class:`AccelmarkError` sets the exit code."""
    try:
        sys.exit(app(standalone_mode=False))
    except _USAGE_ERRORS as error:
        usage: Any = error
        text = io.StringIO()
        usage.show(text)
        options.echo_error(text.getvalue().replace("Value error, ", "").rstrip())
        sys.exit(int(usage.exit_code))
    except AccelmarkError as error:
        if "--json" in sys.argv:
            problems = [str(problem) for problem in error.problems] if isinstance(error, SpecError) else [str(error)]
            typer.echo(json.dumps({"error": type(error).__name__, "problems": problems}))
            sys.exit(error.exit_code)
        lines = printable(str(error)).splitlines() or [type(error).__name__]
        many = len(lines) > 1 and isinstance(error, SpecError)
        options.echo_error(f"error: {len(lines)} problems" if many else f"error: {lines[0]}", fg="red")
        for line in lines if many else lines[1:]:
            options.echo_error(f"  {line}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_CANCELLED)
    except BrokenPipeError:  # the reader of the output has exited (``accelmark … | head``)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
