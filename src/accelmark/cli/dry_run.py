"""Print a plan for ``--dry-run``: an outline, or jobs, commands and settings, without secrets."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from accelmark.cli import options
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.figures import FigureName, title_of, unit_of
from accelmark.run.controller.evaluate import MOST_REPLAYED
from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.onhost import abridged
from accelmark.run.preflight.checks import HostsNotReadyError, given_data
from accelmark.run.preflight.hosts import missing_here, preflight_commands
from accelmark.run.record.directory import require_empty
from accelmark.run.record.states import read_events
from accelmark.spec.errors import SpecError
from accelmark.spec.job import TrainJob
from accelmark.spec.number_format import counted, duration
from accelmark.spec.secret import secrets_in, shown


def print_plan(
    plan: Plan, path: Path, *, as_json: bool, with_commands: bool = False, script: str | None = None
) -> None:
    """Print an outline of ``plan``, or its jobs, commands and settings without secrets; nothing is written or started.

    ``script`` is the batch script, where the run would be submitted. Exits as the run would.
    """
    require_empty(path)
    launcher = create_launcher(plan, path.absolute())
    nodes = {job.directory: asyncio.run(node_jobs(job, launcher)) for job in plan.jobs}
    lacking = asyncio.run(missing_here(launcher))
    raw: dict[str, Any] = plan.model_dump(mode="json")
    secrets = set(secrets_in(raw))
    secrets |= {quoted[1:-1] for secret in secrets if (quoted := shlex.quote(secret)) != secret}
    dry: dict[str, Any] = {
        "directory": str(path),
        "plan": raw,
        "problems": [str(problem) for problem in (*lacking, *plan.missing_data)],
        "first": launcher.allocation_commands() if script is None else [],
        "preflight": asyncio.run(preflight_commands(plan, launcher)),
        "common": {name: launcher.common_commands(mine) for name, mine in nodes.items()},
        "commands": {
            name: {agent.node.host.name: agent.commands() for agent in launcher.agents(mine)}
            for name, mine in nodes.items()
        },
    }
    dry = shown(dry if script is None else dry | {"batch_script": script}, secrets)
    if as_json:
        typer.echo(json.dumps(dry))
    else:
        rounds = "a search of settings" if plan.tuning is not None else counted(len(plan.jobs), "round")
        typer.secho(f"{plan.name}: {rounds} on {plan.vendor}, run directory {path}", bold=True)
        for warning in plan.warnings:
            options.echo_wrapped(f"  warning: {warning}", fg="yellow")
        if with_commands:
            _print_commands_and_settings(plan, dry)
        else:
            _print_outline(plan)
        if lacking or plan.missing_data:
            typer.secho("\nthis would not start", bold=True, err=True)
        options.print_problems(lacking)
        if plan.missing_data:
            raise SpecError(plan.missing_data)
    if plan.missing_data:
        raise typer.Exit(SpecError.exit_code)
    if any(problem.severity == "error" or plan.strict for problem in lacking):
        raise typer.Exit(HostsNotReadyError.exit_code)


def _print_outline(plan: Plan) -> None:
    rounds = Counter(job.directory.partition("/")[0] for job in plan.jobs)
    hosts = {node.host: counted(node.nproc, "device") for job in plan.jobs for node in job.nodes}
    given = {path for _, path in given_data(plan)}
    data = {name: place for job in plan.jobs for name, place in job.job.data_dirs.items()}
    lines = {
        "hosts": [f"{host} ({devices})" for host, devices in hosts.items()],
        "rounds": [f"{key} ({number})" if number > 1 else key for key, number in rounds.items()],
        "data": [f"{name}: {place}{_absence(place, given)}" for name, place in data.items()],
        "time": [_time_of_last_run(set(rounds))],
    }
    for name, values in lines.items():
        options.echo_wrapped(f"  {name:<8}{', '.join(values) or '-'}")
    for line in _search_lines(plan):
        options.echo_wrapped(f"  {line}")
    typer.echo("  --commands prints every command and setting")


def _time_of_last_run(keys: set[str]) -> str:
    """Return how long the newest run of these keys in ``runs/`` took, without interruption."""
    for log in sorted(Path("runs").glob("*/events.jsonl"), key=lambda log: log.stat().st_mtime, reverse=True):
        events = read_events(log)
        ran = {event.job.partition("/")[0] for event in events if event.job is not None}
        whole = [event.kind for event in events if event.kind.startswith("run_")] == ["run_started", "run_finished"]
        if whole and ran == keys:
            start, end = (datetime.fromisoformat(event.at) for event in (events[0], events[-1]))
            return f"about {duration((end - start).total_seconds())}, as {log.parent}"
    return "not known: runs/ has no finished run of these rounds"


def _absence(place: Path, given: Container[Path]) -> str:
    if place.exists():
        return ""
    return "  (missing on this machine, and not fetched)" if place in given else "  (will be fetched)"


def _print_commands_and_settings(plan: Plan, dry: Mapping[str, Any]) -> None:
    if "batch_script" in dry:
        typer.secho("\nbatch job, which runs the rest", bold=True)
        typer.echo("".join(f"  {line}\n" for line in dry["batch_script"].splitlines()), nl=False)
    typer.secho("\npreflight", bold=True)
    _print_commands({"here": dry["first"]} | dry["preflight"])
    if search := _search_lines(plan):
        typer.secho("\nsearch", bold=True)
    for line in search:
        options.echo_wrapped(f"  {line}")
    printed: dict[tuple[str, ...], str] = {}
    given = {path for _, path in given_data(plan)}
    for job in plan.jobs:
        typer.secho(f"\n{job.directory}", bold=True)
        _print_commands({"here": dry["common"][job.directory]} | dry["commands"][job.directory])
        lines = tuple(_settings(job, given))
        if (earlier := printed.setdefault(lines, job.directory)) != job.directory:
            lines = (f"data, requirements and settings as of {earlier}",)
        for line in lines:
            options.echo_wrapped(f"  {line}")


def _print_commands(commands: Mapping[str, list[list[str]]]) -> None:
    for host, lines in commands.items():
        for line in lines:
            typer.echo(f"  {host}: {shlex.join(abridged(line))}")


def _settings(job: PlannedJob, given: Container[Path]) -> Iterator[str]:
    """Yield data, needs and settings of a job as lines; ``given`` are data directories that are not fetched."""
    for name, place in job.job.data_dirs.items():
        yield f"data {name}: {place}{_absence(place, given)}"
    for need in job.requires:
        yield f"requires {need.requirement} ({need.needed_by})"
    for file in job.layer_files:
        yield f"{'applied' if file.applied else 'not applied'}: {file.file}: {file.reason}"
    work = job.job.work
    if isinstance(work, TrainJob) and work.is_checked:
        mib, is_all = work.settings.checkpoint.replay_mib, work.settings.checkpoint.replay_all
        steps = "all pairs of checkpoints" if is_all else f"at most {MOST_REPLAYED} steps"
        yield f"after the round: weights evaluated, {steps} replayed, in a fresh process"
        yield f"checkpoints for it: at most {mib} MiB and 0.3 % of training time, and the final weights"
    width = max(map(len, job.job.provenance), default=0)
    for key, provenance in sorted(job.job.provenance.items()):
        line = f"{key:<{width}}  {options.setting_text(provenance.value):<12}  {provenance.layer}"
        for layer, value in reversed(provenance.replaced):
            line += f", overrides {options.setting_text(value)} ({layer})"
        yield f"{line}  OPEN" if provenance.forced else line


def _search_lines(plan: Plan) -> list[str]:
    """Return the settings that a search tries, in its order, and its limits."""
    tuning = plan.tuning
    if tuning is None:
        return []
    figure, unit, limits = FigureName(tuning.figure), plan.jobs[0].job.work.unit, []
    if tuning.budget_s is not None:
        limits = [f"trials while they and all other rounds fit into {duration(tuning.budget_s)}"]
    limits += [f"at most {tuning.max_trials} trials"] if tuning.max_trials is not None else []
    limits += [f"a round at most {duration(plan.timeout_s)}"] if plan.timeout_s is not None else []
    lines = [
        f"search for the best {title_of(figure, unit)} ({unit_of(figure, unit)}, {tuning.better} is better): "
        + ", ".join(limits),
        "one setting after the other from the settings as shipped, until no change is better by more than 1 %; "
        "results beyond the case's accuracy tolerance cannot be chosen",
    ]
    for choice in tuning.choices:
        tried = ", ".join(" ".join(map(_tried, settings.values())) for settings in choice.values)
        names = " and ".join(choice.values[0])
        lines.append(f"  {f'{choice.engine}: ' if choice.engine else ''}{names}: {tried}")
    rounds = tuning.num_rounds
    lines.append(f"then {rounds} rounds as shipped and {rounds} tuned in turn (the first as shipped begins the search)")
    if tuning.budget_s is not None:
        lines.append(f"without time for a trial, the {rounds} rounds as shipped only, which may exceed the limit")
    if tuning.settings_file is not None:
        lines.append(f"writes the best settings to {tuning.settings_file}")
    return lines


def _tried(value: Any) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
