"""The verb ``data``: data sets and weights of the cases."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, final

import typer
from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.help import Verb, Verbs

if TYPE_CHECKING:
    from accelmark.datasets.catalogue import Known

app = typer.Typer(
    name="data", cls=Verbs, help="Data sets and weights of the cases.", no_args_is_help=True, rich_markup_mode=None
)
_WIDE: Final = 110
"""Columns of a terminal from which the list of data sets shows licences; ``--json`` always has them."""
_INTERVAL_S: Final = 10.0
"""Between lines of progress where the output is not a terminal."""


@app.command("list", cls=Verb)
def list_(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Show this data set: licence, layout and how to obtain it.",
            autocompletion=completion.datasets,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the data sets and weights of all cases: how to obtain them, what is in the cache, sizes and licences."""
    from rich.console import Console

    from accelmark.datasets.catalogue import known_datasets, known_of
    from accelmark.spec.number_format import quantity

    if name is not None:
        one = known_of(name)
        if as_json:
            typer.echo(json.dumps(_row(one), indent=2))
        else:
            _show(one)
        return
    known = known_datasets()
    if as_json:
        typer.echo(json.dumps([_row(each) for each in known], indent=2))
        return
    console = Console()
    licence = ["licence"] if console.width >= _WIDE else []
    table = options.plain_table("data set", "obtained", "size", "cases", *licence)
    for column in table.columns[:3]:
        column.no_wrap = True
    table.columns[3].min_width = 20
    for each in known:
        size = "-" if each.bytes is None else quantity(each.bytes / 2**20, "MiB", 3)
        table.add_row(
            each.spec.name, each.obtained, size, ", ".join(each.cases), *([each.spec.licence] if licence else [])
        )
    console.print(table)


def _show(known: Known) -> None:
    spec, path = known.spec, known.path
    typer.secho(f"{spec.name}: {spec.title}", bold=True)
    listed = {
        "licence": spec.licence,
        "cases": ", ".join(known.cases),
        "obtained": known.obtained,
        "cached in": str(path) if path else "",
        "how to get it": " ".join(spec.how_to_get.split()),
        "layout": "; ".join([part.describe() for part in spec.tree] or [file.path for file in spec.files]),
    }
    for what, text in listed.items():
        if text:
            options.echo_wrapped(f"  {what}: {text}")


def _row(known: Known) -> dict[str, object]:
    spec = known.spec
    return {
        "name": spec.name,
        "title": spec.title,
        "licence": spec.licence,
        "obtained": known.obtained,
        "path": str(known.path) if known.path else None,
        "bytes": known.bytes,
        "cases": list(known.cases),
        "how_to_get": spec.how_to_get,
        "layout": [part.describe() for part in spec.tree],
    }


@app.command(cls=Verb)
def prepare(
    name: Annotated[
        str, Argument(metavar="NAME", help="Data set in 'accelmark data list'.", autocompletion=completion.prepared)
    ],
    source: Annotated[Path, Option("--from", metavar="DIR", help="Directory with the published archives.")],
    to: Annotated[Path, Option("--to", metavar="DIR", help="Directory to write the data set to.")],
) -> None:
    """Make a data set from its published archives: verify, unpack, sort and convert them.

    Nothing is downloaded. Archives are verified by their published MD5 sums before anything is written. An interrupted
    preparation continues where it was when the command is given again.
    """
    from accelmark.datasets.catalogue import preparation_of
    from accelmark.datasets.prepare.preparation import prepare as make

    spec, preparation = preparation_of(name)
    with _Line() as line:
        used = make(spec, preparation, source.expanduser(), to.expanduser(), progress=line.show)
    left = [archive.name for archive in preparation.archives if archive.name not in used]
    typer.echo(f"{spec.title} is in {to}" + (f"; not found and left out: {', '.join(left)}" if left else ""))


@app.command(cls=Verb)
def pack(
    name: Annotated[str, Argument(metavar="NAME", help="Data set in 'accelmark data list', such as imagenet.")],
    source: Annotated[Path, Option("--from", metavar="DIR", help="Directory with the prepared data set.")],
    to: Annotated[Path, Option("--to", metavar="DIR", help="Directory to write the shards to.")],
) -> None:
    """Pack a prepared data set of images in class folders into WebDataset's shards, which cases read as well.

    Images are shuffled, always in the same way. An interrupted call continues after the last complete shard.
    """
    from accelmark.datasets.catalogue import dataset_of
    from accelmark.datasets.pack import pack as make

    spec = dataset_of(name)
    with _Line() as line:
        count = make(spec, source.expanduser(), to.expanduser(), progress=line.show)
    typer.echo(f"{count:,} images of {spec.title} are in {to}")


@final
class _Line:
    """A line of progress on the terminal, or one every ten seconds in a log."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_s, self._what = 0.0, ""

    def show(self, what: str, done: int, total: int | None) -> None:
        """Show the activity and the share that is done."""
        from accelmark.spec.number_format import percent, quantity

        now_s = time.monotonic()
        if not self._is_terminal and what == self._what and now_s - self._shown_s < _INTERVAL_S:
            return
        self._shown_s, self._what = now_s, what
        size = quantity((total or done) / 2**20, "MiB", 3)
        text = f"{what}: {percent(done / total)} of {size}" if total else f"{what}: {size}"
        typer.echo(f"\r\x1b[K{text}" if self._is_terminal else text, err=True, nl=not self._is_terminal)

    def __enter__(self) -> _Line:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        if self._is_terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)
