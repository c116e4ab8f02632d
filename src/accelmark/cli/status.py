"""``accelmark status RUN``: the state of every round of a run."""

from __future__ import annotations

import json

import typer

from accelmark.cli import options


def status(run: options.RunPath, as_json: options.AsJson = False) -> None:
    """Show the state and progress of every round of a run."""
    from dataclasses import asdict

    from accelmark.run.display.summary import print_status, read_status

    current = read_status(run)
    if as_json:
        jobs = {
            name: asdict(state) | {"progress": asdict(current.progress[name]) if name in current.progress else None}
            for name, state in current.statuses.items()
        }
        typer.echo(json.dumps({"run": str(current.directory.path), "coordinator": current.coordinator, "jobs": jobs}))
        return
    print_status(current)
