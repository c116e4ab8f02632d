"""``accelmark stop RUN``: stop a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from accelmark.cli import options


def stop(
    run: options.RunPath,
    at_once: Annotated[bool, typer.Option("--now", help="Kill the ranks instead of letting them end.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Stop a run. This works even if its coordinator has died; results so far are kept."""
    from accelmark.run.controller.stop import stop as stop_run

    was_running = stop_run(run, at_once=at_once)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "stopped": was_running}))
    else:
        typer.echo(f"{run}: stopped" if was_running else f"{run}: not running")
