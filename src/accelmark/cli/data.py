"""The verb ``data``: data sets and weights of the cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accelmark.cli import completion, options
from accelmark.cli.options import Output, Verb, argument, group, option
from accelmark.spec.number_format import percent, quantity

if TYPE_CHECKING:
    from accelmark.datasets.catalogue import Known

app = group("data", "Data sets and weights of the cases.")


@app.command("list", cls=Verb)
def list_(
    name: Annotated[
        str | None,
        argument("NAME", "Show this data set: licence, layout and how to obtain it.", completion.datasets),
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """List the data sets and weights of all cases: how to obtain them, what is in the cache, sizes and licences."""
    from accelmark.datasets.catalogue import known_datasets, known_of

    if name is not None:
        dataset = known_of(name)
        row = _row(dataset)

        def show() -> None:
            typer.secho(f"{name}: {row['title']}", bold=True)
            shown = row | {
                "cases": ", ".join(row["cases"]),
                "how to get it": " ".join(row["how_to_get"].split()),
                "layout": "; ".join(row["layout"] or [file.path for file in dataset.spec.files]),
            }
            for title in ("licence", "cases", "obtained", "path", "how to get it", "layout"):
                if shown[title]:
                    options.echo_wrapped(f"  {title}: {shown[title]}")

        return Output(row, show)
    datasets = known_datasets()

    def list_all() -> None:
        console = options.rich_console(highlight=True)
        licence = ["licence"] if console.width >= options.WIDE else []
        table = options.plain_table("data set", "obtained", "size", "cases", *licence, fixed=3)
        table.columns[3].min_width = 20
        for known in datasets:
            size = "-" if known.bytes is None else quantity(known.bytes / 2**20, "MiB", 3)
            more = [known.spec.licence] if licence else []
            table.add_row(known.spec.name, known.obtained, size, ", ".join(known.cases), *more)
        console.print(table)

    return Output([_row(known) for known in datasets], list_all)


def _row(known: Known) -> dict[str, Any]:
    spec = known.spec
    return {
        "name": spec.name, "title": spec.title, "licence": spec.licence, "obtained": known.obtained,
        "path": str(known.path) if known.path else None, "bytes": known.bytes, "cases": list(known.cases),
        "how_to_get": spec.how_to_get, "layout": [part.describe() for part in spec.tree],
    }  # fmt: skip


@app.command(cls=Verb)
def prepare(
    name: Annotated[str, argument("NAME", "Data set in 'accelmark data list'.", completion.prepared)],
    source: Annotated[Path, option("DIR", "Directory with the published archives.", "--from")],
    to: Annotated[Path, option("DIR", "Directory to write the data set to.")],
) -> None:
    """Make a data set from its published archives: verify, unpack, sort and convert them.

    Nothing is downloaded. Archives are verified by their published MD5 sums before anything is written. An interrupted
    preparation continues where it was when the command is given again.
    """
    from accelmark.datasets.catalogue import preparation_of
    from accelmark.datasets.prepare.preparation import prepare as make
    from accelmark.datasets.verify import fingerprint

    spec, preparation = preparation_of(name)
    source, to = source.expanduser(), to.expanduser()
    with _progress() as progress:
        used = make(spec, preparation, source, to, progress=progress)
    left = [archive.name for archive in preparation.archives if archive.name not in used]
    typer.echo(f"{spec.title} is in {to}" + (f"; not found and left out: {', '.join(left)}" if left else ""))
    counted = [] if preparation.count is None else [preparation.count(to)]
    typer.echo("; ".join([*counted, f"SHA-256 {fingerprint(spec, to)} (of names and sizes)"]))


@app.command(cls=Verb)
def pack(
    name: Annotated[str, argument("NAME", "Data set in 'accelmark data list', such as imagenet.")],
    source: Annotated[Path, option("DIR", "Directory with the prepared data set.", "--from")],
    to: Annotated[Path, option("DIR", "Directory to write the shards to.")],
    shard_format: Annotated[
        Literal["webdataset", "tfrecord"],
        typer.Option("--format", help="'webdataset': tar archives; 'tfrecord': as build_imagenet_data.py writes them."),
    ] = "webdataset",
) -> None:
    """Pack a prepared data set of images in class folders into shards, which cases read as well.

    Images are shuffled, always in the same way. An interrupted call continues after the last complete shard.
    """
    from accelmark.datasets.catalogue import known_of
    from accelmark.datasets.prepare.preparation import pack as make

    spec = known_of(name).spec
    with _progress() as progress:
        count = make(spec, source.expanduser(), to.expanduser(), shard_format=shard_format, progress=progress)
    typer.echo(f"{count:,} images of {spec.title} are in {to}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Provide a function that shows an activity and, on a terminal, the share that is done."""
    console = options.rich_console(stderr=True)
    shown = ""
    with console.status("") as status:

        def show(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            size = quantity((total or done) / 2**20, "MiB", 3)
            status.update(f"{what}: {percent(done / total)} of {size}" if total else f"{what}: {size}")
            if what != shown and not console.is_terminal:
                console.print(what, markup=False)
            shown = what

        yield show
