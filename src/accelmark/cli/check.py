"""``accelmark check vendor NAME`` and ``check case NAME``: check a folder for completeness."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from accelmark.cli.conformance import Check

app = typer.Typer(
    help="Check the folder of a vendor or a case for completeness.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name as listed by 'accelmark vendors' or 'accelmark cases'.")
]


@app.command("vendor")
def check_vendor(
    name: Name,
    run: Annotated[
        bool,
        typer.Option(
            "--run/--no-run", help="Also read the devices of this machine and train a few steps of each case."
        ),
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Check vendors/NAME: description, peak rates with their sources, telemetry, and adaptations of cases."""
    from accelmark.cli.conformance import vendor_checks

    _print_checks(vendor_checks(name, run=run), as_json=as_json)


@app.command("case")
def check_case(
    name: Name,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Also train a few steps on synthetic data.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Check cases/NAME: description, code, and training on synthetic data."""
    from accelmark.cli.conformance import case_checks

    _print_checks(case_checks(name, run=run), as_json=as_json)


def _print_checks(checks: list[Check], *, as_json: bool) -> None:
    from accelmark.spec.errors import EXIT_FAILED

    if as_json:
        typer.echo(json.dumps([{"state": c.state, "what": c.what, "do": c.do} for c in checks], indent=2))
    else:
        signs = {"good": ("✓", "green"), "missing": ("✕", "red"), "advice": ("!", "yellow")}
        for check in checks:
            sign, colour = signs[check.state]
            typer.secho(f"{sign} ", fg=colour, nl=False)
            typer.echo(check.what + (f"\n    {check.do}" if check.do else ""))
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(EXIT_FAILED)
