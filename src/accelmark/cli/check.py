"""``accelmark check vendor NAME`` and ``check case NAME``: what a folder still lacks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from accelmark.cli.check_line import Check

app = typer.Typer(help="Say what a vendor's or case's folder still lacks.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As 'accelmark vendors' or 'accelmark cases' lists it.")]


@app.command("vendor")
def check_vendor(
    name: Name,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Read the devices here and train a few steps of each case too.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Check vendors/NAME: its description, peaks and sources, telemetry, and each adaptation of a case."""
    from accelmark.cli.conformance import vendor_checks

    _tell(vendor_checks(name, run=run), as_json=as_json)


@app.command("case")
def check_case(
    name: Name,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Train a few steps on made-up data too.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Check cases/NAME: its description and code, and that it trains on made-up data."""
    from accelmark.cli.conformance import case_checks

    _tell(case_checks(name, run=run), as_json=as_json)


def _tell(checks: list[Check], *, as_json: bool) -> None:
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
