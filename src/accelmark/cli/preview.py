"""``--dry-run``: the jobs of a plan, each host's commands, and where every setting comes from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from accelmark.plan import Plan
from accelmark.plan.plan import PlannedJob
from accelmark.run.controller.node_jobs import job_on_hosts, node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import abridged
from accelmark.run.preflight.check import preflight_commands
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.secret import secrets_in, shown


def preview(plan: Plan, path: Path, *, as_json: bool) -> None:
    """Print what carrying out ``plan`` at ``path`` would do, without secrets; nothing is written or started."""
    directory = RunDirectory(path.absolute(), plan)
    launcher = create_launcher(plan, directory.path)
    commands = {job.directory: _commands(directory, job, launcher) for job in plan.jobs}
    first, looks = launcher.allocation_commands(), preflight_commands(plan, launcher, plan.jobs)
    raw = plan.model_dump(mode="json")
    secrets = set(secrets_in(raw))
    secrets |= {quoted[1:-1] for secret in secrets if (quoted := shlex.quote(secret)) != secret}
    first, looks, commands = (shown(value, secrets) for value in (first, looks, commands))
    if as_json:
        shown_commands = {"first": first, "preflight": looks, "commands": commands}
        typer.echo(json.dumps({"directory": str(path), "plan": shown(raw, secrets), **shown_commands}))
        return
    rounds = "1 round" if len(plan.jobs) == 1 else f"{len(plan.jobs)} rounds"
    typer.secho(f"{plan.name}: {rounds} on {plan.vendor}, into {path}", bold=True)
    for warning in plan.warnings:
        typer.secho(f"  warning: {warning}", fg="yellow")
    typer.secho("\npreflight", bold=True)
    for line in first:
        typer.echo(f"  here: {shlex.join(line)}")
    _print_commands(looks)
    seen: set[str] = set()
    for job in plan.jobs:
        typer.secho(f"\n{job.directory}", bold=True)
        _print_commands(commands[job.directory])
        if job.job.key.slug in seen:
            continue
        seen.add(job.job.key.slug)
        _settings(job)


def _print_commands(commands: Mapping[str, list[list[str]]]) -> None:
    for host, lines in commands.items():
        for line in lines:
            typer.echo(f"  {host}: {shlex.join(abridged(line))}")


def _commands(directory: RunDirectory, job: PlannedJob, launcher: Launcher) -> dict[str, list[list[str]]]:
    spec = job_on_hosts(directory, job, go_on=False)
    return {node.host.name: launcher.job_commands(node) for node in node_jobs(directory, job, spec, launcher)}


def _settings(job: PlannedJob) -> None:
    for name, place in job.job.data_dirs.items():
        typer.echo(f"  data {name}: {place}" + ("" if place.exists() else "  (to be fetched)"))
    for file in job.layer_files:
        typer.echo(f"  {'applied' if file.applied else 'not applied'}: {file.file}: {file.reason}")
    width = max(map(len, job.job.provenance), default=0)
    for key, provenance in sorted(job.job.provenance.items()):
        replaced = "".join(f", instead of {_short(value)} ({layer})" for layer, value in reversed(provenance.replaced))
        mark = "  OPEN" if provenance.forced else ""
        typer.echo(f"  {key:<{width}}  {_short(provenance.value):<12}  {provenance.layer}{replaced}{mark}")


def _short(value: Any) -> str:
    return "-" if value is None else json.dumps(value) if isinstance(value, dict | list | tuple | bool) else str(value)
