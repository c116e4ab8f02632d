"""``accelmark status RUN``: where a run stands, from any terminal."""

from __future__ import annotations

import json

import typer

from accelmark.cli import options


def status(run: options.RunPath, as_json: options.AsJson = False) -> None:
    """Show the state of every round of a run, and how far the running one is."""
    from dataclasses import asdict

    from accelmark.run.controller import session

    seen = session.read_status(run)
    if as_json:
        jobs = {
            name: asdict(where) | {"progress": asdict(seen.progress[name]) if name in seen.progress else None}
            for name, where in seen.statuses.items()
        }
        typer.echo(json.dumps({"run": str(seen.directory.path), "coordinator": seen.coordinator, "jobs": jobs}))
        return
    from accelmark.run.display.closing import print_status

    print_status(seen)
