"""Execute a plan, print it or submit it, and print the results of its run."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from accelmark.cli import options
from accelmark.spec.errors import EXIT_FAILED, AccelmarkError, RequestError

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan
    from accelmark.run.controller.coordinator import RunOutcome
    from accelmark.run.launchers import SubmittedJob


def execute(
    plan: Plan,
    out: Path | None,
    *,
    runs: Path | None = None,
    offline: bool,
    as_json: bool,
    dry_run: bool = False,
    with_commands: bool = False,
    submit: bool = False,
    is_judged: bool = False,
) -> Path | None:
    """Execute or submit ``plan``, or only print it, and end with the exit code of the run unless it is 0.

    The run directory is ``out``, or a new one in ``runs``. ``is_judged``: the caller judges a run that failed or is
    INVALID. Returns the run directory, or None where nothing was started.
    """
    from accelmark.run.record.directory import default_path

    path = out or default_path(plan.name, datetime.now(UTC), runs or Path("runs"))
    # The same command in a batch job, which names the run directory.
    inside = [argument for argument in sys.argv[1:] if argument not in ("--submit", "--dry-run", "--commands")]
    inside += [] if out is not None else ["--out", str(path.absolute())]
    if plan.strict and plan.warnings:
        raise RequestError("\n".join(["not started: --strict is set and there are warnings:", *plan.warnings]))
    if dry_run or with_commands:
        from accelmark.cli.dry_run import print_plan
        from accelmark.run.launchers import submit_module

        script = submit_module(plan).batch_script(plan, path.absolute(), inside) if submit else None
        print_plan(plan, path, as_json=as_json, with_commands=with_commands, script=script)
        return None
    if submit:
        from accelmark.run.launchers import submit_module
        from accelmark.run.record.directory import require_empty

        place = path.absolute()
        require_empty(place)
        number = submit_module(plan).submit(plan, place, inside)
        if as_json:
            typer.echo(json.dumps({"run": str(place), "job": number}))
        else:
            typer.echo(f"submitted as job {number}; it writes {place}\nfollow it with 'accelmark status {place}'")
        return None
    from accelmark.run.controller import coordinator
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.hosts import run_preflight

    plan = plan.model_copy(update={"offline": offline})
    if not as_json:
        for warning in plan.warnings:
            options.warn(warning)
    with options.host_problems_printed(as_json=as_json):
        outcome = coordinator.start(plan, path, DataFetcher(offline), run_preflight, as_json=as_json)
    finish(outcome, as_json=as_json, is_judged=is_judged)
    return outcome.directory


def submitted_job(run: Path) -> tuple[Path, SubmittedJob] | None:
    """Return the path and the batch job of a run that was submitted and has no directory (yet), else None."""
    from accelmark.run.launchers import submitted

    paths = (run.absolute(), Path("runs").absolute() / run)
    if any(path.exists() for path in paths):
        return None
    return next(((path, job) for path in paths if (job := submitted(path)) is not None), None)


def finish(outcome: RunOutcome, *, as_json: bool, is_judged: bool = False) -> None:
    """Write the report page, print the results, and exit with the exit code of the run."""
    from accelmark.report.run_page import write_page

    page = None
    try:
        page = write_page(outcome.directory)
    except AccelmarkError as error:  # the results exist
        if not as_json:
            options.warn(f"cannot write the report page: {error}")
    if as_json:
        done = {"event": "summary", "directory": str(outcome.directory), "page": str(page) if page else None}
        summary = outcome.summary.model_dump(mode="json")
        typer.echo(json.dumps(done | {"exit_code": outcome.exit_code, "summary": summary}))
    else:
        from accelmark.run.display.summary import print_summary

        print_summary(outcome.summary, outcome.directory, page)
    if outcome.summary.tuning is not None:
        from accelmark.cli.tuning import write_settings_file

        write_settings_file(outcome.directory, as_json=as_json)
    if outcome.exit_code and not (is_judged and outcome.exit_code == EXIT_FAILED):
        raise typer.Exit(outcome.exit_code)
