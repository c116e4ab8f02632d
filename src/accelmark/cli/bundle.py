"""``accelmark bundle RUN``: pack a run into one file that others can verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def bundle(
    run: options.RunPath,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Output file; default: one in this directory."),
    ] = None,
) -> None:
    """Pack a run into one file. Contains results, events, configuration and logs, without secrets."""
    from accelmark.results.store.bundle import bundle_name, write_bundle

    path = output or Path(bundle_name(run))
    write_bundle(run, path)
    typer.echo(str(path))
