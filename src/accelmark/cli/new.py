"""``accelmark new vendor NAME`` and ``new case NAME``: a folder that works, to be filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make a working folder for a vendor or a case.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and underscores.")]
Into = Annotated[
    Path, typer.Option("--into", metavar="DIR", help="Directory with vendors/ and cases/; the current one otherwise.")
]


@app.command("vendor")
def new_vendor(name: Name, into: Into = Path()) -> None:
    """Make vendors/NAME with a description of a chip and an adaptation of resnet_mini."""
    from accelmark.spec.scaffold import new_folder

    _tell(new_folder("vendors", name, into), name, "vendor", into)


@app.command("case")
def new_case(name: Name, into: Into = Path()) -> None:
    """Make cases/NAME with a case that trains as it stands."""
    from accelmark.spec.scaffold import new_folder

    _tell(new_folder("cases", name, into), name, "case", into)


def _tell(folder: Path, name: str, kind: str, into: Path) -> None:
    typer.echo(f"{folder}\n")
    typer.echo(f"Next:  export ACCELMARK_PLUGINS={into.absolute()}\n       accelmark check {kind} {name}")
