"""``accelmark new vendor NAME`` and ``new case NAME``: create a folder from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Create a folder for a vendor or a case from a template.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and underscores.")]
Into = Annotated[
    Path,
    typer.Option(
        "--into", metavar="DIR", help="Directory that contains vendors/ and cases/; default: the current one."
    ),
]


@app.command("vendor")
def new_vendor(name: Name, into: Into = Path()) -> None:
    """Create vendors/NAME with a chip description and an adaptation of resnet_mini."""
    from accelmark.spec.plugins.scaffold import new_folder

    _print_next(new_folder("vendors", name, into), name, "vendor", into)


@app.command("case")
def new_case(name: Name, into: Into = Path()) -> None:
    """Create cases/NAME with a case that can be trained as it is."""
    from accelmark.spec.plugins.scaffold import new_folder

    _print_next(new_folder("cases", name, into), name, "case", into)


def _print_next(folder: Path, name: str, kind: str, into: Path) -> None:
    typer.echo(f"{folder}\n")
    typer.echo(f"Next:  export ACCELMARK_PLUGINS={into.absolute()}\n       accelmark check {kind} {name}")
