"""``accelmark new vendor NAME`` and ``new case NAME``: create a folder from a template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES: Final = Path(__file__).parent / "templates"
_ADAPTATION: Final = "adaptation"
_CODE: Final = ".in"
"""Suffix of template files, so that they are not treated as code of this package."""

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
    _print_next(new_folder("vendors", name, into), name, "vendor", into)


@app.command("case")
def new_case(name: Name, into: Into = Path()) -> None:
    """Create cases/NAME with a case that can be trained as it is."""
    _print_next(new_folder("cases", name, into), name, "case", into)


def new_folder(kind: Literal["cases", "vendors"], name: str, into: Path) -> Path:
    """Create ``into/<kind>/<name>`` and return it.

    Raises:
        RequestError: the name is invalid or taken, or the folder exists.
    """
    from accelmark.spec.errors import RequestError
    from accelmark.spec.plugins.catalog import folders, look_again

    if not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} cannot be a name: lower-case letters, digits and underscores, a letter first")
    known = folders(kind)
    if name in known:
        raise RequestError(f"{name!r} is taken: {known[name].path} ({known[name].origin})")
    folder = into / kind / name
    if folder.exists():
        raise RequestError(f"{folder}: exists already; choose another name or remove it")
    template = _TEMPLATES / kind
    for source in sorted(path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        parts = (*source.relative_to(template).parts[:-1], source.name.removesuffix(_CODE))
        if parts[0] == _ADAPTATION:
            parts = ("cases", "resnet_mini-pytorch", *parts[1:])
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        target.write_text(text.replace("@NAME@", name).replace("@UPPER@", name.upper()), encoding="utf-8")
    look_again()
    return folder


def _print_next(folder: Path, name: str, kind: str, into: Path) -> None:
    typer.echo(f"{folder}\n")
    typer.echo(f"Next:  export ACCELMARK_PLUGINS={into.absolute()}\n       accelmark check {kind} {name}")
