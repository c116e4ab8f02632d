"""``accelmark resume RUN``: continue an interrupted run."""

from __future__ import annotations

from typing import Annotated

import typer

from accelmark.cli import options


def resume(
    run: options.RunPath,
    redo_failed: Annotated[bool, typer.Option("--failed", help="Also repeat rounds that failed or timed out.")] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Ignore checkpoints.")] = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Continue an interrupted run. Follows running rounds, repeats lost and cancelled ones, skips finished ones."""
    from accelmark.cli.execute import finish, host_problems_as_table
    from accelmark.run.controller import session
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.report import run_preflight

    with host_problems_as_table(as_json=as_json):
        outcome = session.resume(
            run,
            DataFetcher(offline),
            redo_failed=redo_failed,
            from_scratch=from_scratch,
            as_json=as_json,
            preflight=run_preflight,
        )
    finish(outcome, as_json=as_json)
