"""``accelmark resume RUN``: go on with a run that was cut off."""

from __future__ import annotations

from typing import Annotated

import typer

from accelmark.cli import options


def resume(
    run: options.RunPath,
    redo_failed: Annotated[bool, typer.Option("--failed", help="Redo rounds that failed or timed out, too.")] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Do not go on from checkpoints.")] = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Attach to what still runs, redo what was lost or cancelled, skip what is done."""
    from accelmark.cli.carry_out import conclude, told_in_a_table
    from accelmark.run.controller import session
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.report import run_preflight

    with told_in_a_table(as_json=as_json):
        outcome = session.resume(
            run,
            DataFetcher(offline),
            redo_failed=redo_failed,
            from_scratch=from_scratch,
            as_json=as_json,
            preflight=run_preflight,
        )
    conclude(outcome, as_json=as_json)
