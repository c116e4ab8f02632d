"""``accelmark stop RUN``: end a run from anywhere."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from accelmark.cli import options


def stop(
    run: options.RunPath,
    at_once: Annotated[bool, typer.Option("--now", help="Kill instead of ending cleanly.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """End a run, also one whose coordinator is dead; results so far are kept."""
    from accelmark.run.controller import session

    was_running = session.stop(run, at_once=at_once)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "stopped": was_running}))
    else:
        typer.echo(f"{run}: stopped" if was_running else f"{run}: had ended already")
