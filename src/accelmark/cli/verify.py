"""``accelmark verify RUN|BUNDLE``: recompute and audit the results of a run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from rich.console import RenderableType


def verify(
    target: Annotated[Path, typer.Argument(metavar="RUN|BUNDLE", help="Run directory or bundle.")],
    as_json: options.AsJson = False,
) -> None:
    """Recompute and audit the results of a run. Compares figures with events and telemetry, and checks file hashes."""
    from accelmark.audit.verify import Verification, verify_run
    from accelmark.results.store.bundle import unpack
    from accelmark.spec.errors import EXIT_FAILED, RequestError

    if target.is_dir():
        archive: list[str] = []
        found = verify_run(target)
    elif target.is_file():
        with tempfile.TemporaryDirectory(prefix="accelmark-verify-") as directory:
            run_dir, archive = unpack(target, Path(directory))
            found = verify_run(run_dir)
    else:
        raise RequestError(f"{target}: no such run directory or bundle")
    verification = Verification(found.summary, (*archive, *found.changed), found.differences, found.num_figures)
    if as_json:
        content = {
            "intact": verification.is_intact,
            "changed": verification.changed,
            "differences": verification.differences,
            "num_figures": verification.num_figures,
            "cases": [case.model_dump(mode="json") for case in verification.summary.cases],
        }
        typer.echo(json.dumps(content))
    else:
        _show(verification)
    if not verification.is_intact or any(case.verdict == "INVALID" for case in verification.summary.cases):
        raise typer.Exit(EXIT_FAILED)


def _show(verification: object) -> None:
    from rich.console import Console
    from rich.text import Text

    from accelmark.audit.verify import Verification

    assert isinstance(verification, Verification)  # noqa: S101  imported late to keep the command line quick
    console = Console(highlight=False, soft_wrap=True)
    styles = {"error": "red", "open": "yellow", "warning": "yellow", "info": "dim"}
    for case in verification.summary.cases:
        style = {"VALID": "bold green", "OPEN": "bold yellow", "INVALID": "bold red"}[case.verdict]
        console.print(Text.assemble((case.verdict, style), f"  {case.key}"))
        for finding in case.findings:
            console.print(Text.assemble("  ", (f"{finding.severity:7}", styles[finding.severity]), f" {finding}"))
        if case.adaptation is not None:
            console.print(_cost_table(case.adaptation))
    for what in (*verification.changed, *verification.differences):
        console.print(Text(f"differs: {what}", style="red"))
    intact = f"All {verification.num_figures} figures match the events and telemetry; no file was changed."
    console.print(
        Text(intact, style="green")
        if verification.is_intact
        else Text("The results do not match the records.", style="red")
    )


def _cost_table(cost: object) -> RenderableType:
    """Return a table of the vendor's changes to the standard case."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from accelmark.results.schema import AdaptationCost

    assert isinstance(cost, AdaptationCost)  # noqa: S101  imported late, as above
    rows = [("setting", key.key, f"{key.value} instead of {key.standard}") for key in cost.keys]
    rows += [("hook", hook.name, _place(hook.place, hook.num_lines)) for hook in cost.hooks]
    rows += [("extern", file, f"{lines} lines") for file, lines in cost.extern.items()]
    rows += [("kernel", file, f"{lines} lines") for file, lines in cost.kernels.items()]
    rows += [("engine", file, f"{lines} lines") for file, lines in cost.engines.items()]
    rows += [("requirement", name, "installed for the ranks") for name in cost.requirements]
    rows += [("variable", name, "set by environment_variables.sh") for name in cost.environment]
    if not rows:
        return Text("  Adaptation cost: none", style="dim")
    table = Table("change", "name", "value or place", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _place(place: str, num_lines: int | None) -> str:
    return place if num_lines is None else f"{place}, {num_lines} lines"
