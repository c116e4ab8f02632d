"""Verbs that start, continue, follow and stop runs: train, infer, run, resume, status, stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from accelmark.cli import options


def train(
    key: Annotated[str, Argument(help="model[:framework[:hardware[:nnodes[:nproc[:repeat]]]]]")],
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    is_open: options.Open = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a case and measure it. Writes a run directory with a report page."""
    from accelmark.cli.execute import Overrides, execute, plan_request, run_name
    from accelmark.spec.runfile import CaseRequest, RunSpec

    case = CaseRequest(key=key, data=data and data.expanduser())
    overrides = Overrides(vendor, settings or (), synthetic, is_open, strict, timeout_s=timeout)
    plan = plan_request(RunSpec(name=run_name(key), cases=(case,)), overrides)
    execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json)


def infer(
    key: Annotated[str, Argument(help="model[:framework[_version][:hardware]]")],
    compiler: Annotated[
        str | None, Option(metavar="NAME", help="Inference engine; 'none' stops after the framework's own.")
    ] = None,
    precision: Annotated[str | None, Option("--precision", help="fp32, tf32, bf16, fp16 or int8.")] = None,
    batch_size: Annotated[int | None, Option("--batch-size", min=1, help="Items in one call.")] = None,
    scenario: Annotated[
        list[str] | None, Option(help="LoadGen scenario: offline, single_stream, multi_stream or server. Repeatable.")
    ] = None,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Run inference on a case's trained model in an engine. The report has its accuracy with its speed."""
    from accelmark.cli.execute import Overrides, execute, plan_request, run_name
    from accelmark.spec.runfile import CaseRequest, RunSpec

    given: dict[str, Any] = {"precision": precision, "batch_size": batch_size}
    given["scenarios"] = tuple(scenario) if scenario else None
    named = {name: value for name, value in given.items() if value is not None}
    if compiler is not None:
        named["compiler"] = None if compiler == "none" else compiler
    case = CaseRequest(key=key, task="infer", data=data and data.expanduser(), settings=named)
    overrides = Overrides(vendor, settings or (), synthetic, strict=strict, timeout_s=timeout)
    plan = plan_request(RunSpec(name=f"{run_name(key)}-infer", cases=(case,)), overrides)
    execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json)


def run(
    file: Annotated[Path, Argument(metavar="FILE", help="Run file (YAML).")],
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    is_open: options.Open = False,
    strict: options.Strict = False,
    fail_fast: options.FailFast = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Run all cases of a run file, one round after another."""
    from accelmark.cli.execute import Overrides, execute, plan_request, read_run_file

    overrides = Overrides(vendor, settings or (), synthetic, is_open, strict, fail_fast, timeout)
    plan = plan_request(read_run_file(file), overrides, where=str(file), base=file.parent)
    execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json)


def resume(
    run: options.RunPath,
    redo_failed: Annotated[bool, Option("--failed", help="Also repeat rounds that failed or timed out.")] = False,
    from_scratch: Annotated[bool, Option("--from-scratch", help="Ignore checkpoints.")] = False,
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


def status(run: options.RunPath, as_json: options.AsJson = False) -> None:
    """Show the state and progress of every round of a run."""
    from accelmark.run.display.summary import print_status, read_status

    current = read_status(run)
    if not as_json:
        print_status(current)
        return
    jobs = {
        name: asdict(state) | {"progress": asdict(current.progress[name]) if name in current.progress else None}
        for name, state in current.statuses.items()
    }
    typer.echo(json.dumps({"run": str(current.directory.path), "coordinator": current.coordinator, "jobs": jobs}))


def stop(
    run: options.RunPath,
    at_once: Annotated[bool, Option("--now", help="Kill the ranks instead of letting them end.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Stop a run. This works even if its coordinator has died; results so far are kept."""
    from accelmark.run.controller import session

    was_running = session.stop(run, at_once=at_once)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "stopped": was_running}))
    else:
        typer.echo(f"{run}: stopped" if was_running else f"{run}: not running")
