"""Carrying out a plan from the command line, and saying what it came to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from accelmark.cli.preview import preview
from accelmark.plan import Plan
from accelmark.run.controller.data import DataFetcher
from accelmark.run.record.directory import default_path
from accelmark.spec.errors import EXIT_OK, AccelmarkError, RequestError

if TYPE_CHECKING:
    from accelmark.run.controller.session import RunOutcome


def carry_out(plan: Plan, out: Path | None, *, offline: bool, dry_run: bool, as_json: bool) -> None:
    """Carry out ``plan`` (or only show it) and end the command with the fitting exit code."""
    path = out or default_path(plan.name, datetime.now(UTC))
    if plan.strict and plan.warnings:
        raise RequestError("\n".join(["refused, since --strict is set:", *plan.warnings]))
    if dry_run:
        preview(plan, path, as_json=as_json)
        return
    from accelmark.run.controller.session import start
    from accelmark.run.preflight.report import run_preflight

    plan = plan.model_copy(update={"offline": offline})
    if not as_json:
        for warning in plan.warnings:
            typer.secho(f"warning: {warning}", fg="yellow", err=True)
    with told_in_a_table(as_json=as_json):
        outcome = start(plan, path, DataFetcher(offline), as_json=as_json, preflight=run_preflight)
    conclude(outcome, as_json=as_json)


@contextmanager
def told_in_a_table(*, as_json: bool) -> Iterator[None]:
    """End the command with one table of every problem of every host where hosts are not ready; programs get a list."""
    from accelmark.run.preflight.facts import HostsNotReadyError
    from accelmark.run.preflight.report import print_table

    try:
        yield
    except HostsNotReadyError as error:
        if as_json:
            raise
        typer.secho("error: hosts are not ready", fg="red", err=True)
        print_table(error.found)
        raise typer.Exit(error.exit_code) from error


def conclude(outcome: RunOutcome, *, as_json: bool) -> None:
    """Write the page, print what the run came to, and end with its exit code."""
    page = _page(outcome.directory, as_json=as_json)
    if as_json:
        summary = outcome.summary.model_dump(mode="json")
        done = {"event": "summary", "directory": str(outcome.directory), "page": str(page) if page else None}
        typer.echo(json.dumps(done | {"exit_code": outcome.exit_code, "summary": summary}))
    else:
        from accelmark.run.display.closing import print_summary

        print_summary(outcome.summary, outcome.directory, page)
    if outcome.exit_code != EXIT_OK:
        raise typer.Exit(outcome.exit_code)


def _page(run_dir: Path, *, as_json: bool) -> Path | None:
    """Write the page of a run; a page that cannot be written does not spoil the run."""
    from accelmark.report.run_page import write_page

    try:
        return write_page(run_dir)
    except AccelmarkError as error:
        if not as_json:
            typer.secho(f"warning: the page could not be written: {error}", fg="yellow", err=True)
        return None
