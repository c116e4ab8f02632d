"""``accelmark bundle RUN``: a run in one file, for somebody else to verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def bundle(
    run: options.RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here; the current directory otherwise.")
    ] = None,
) -> None:
    """Pack results, events, configurations and logs of a run into one file, without secrets."""
    from accelmark.results.store.bundle import bundle_name, write_bundle

    path = output or Path(bundle_name(run))
    write_bundle(run, path)
    typer.echo(str(path))
