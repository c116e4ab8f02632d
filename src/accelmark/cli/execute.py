"""Plan a request of the command line, execute the plan or print it (``--dry-run``), and print the results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import typer

from accelmark.plan.adaptation import host_capabilities
from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected
from accelmark.run.controller.data import DataFetcher, data_dirs
from accelmark.run.controller.node_jobs import job_on_hosts, node_jobs
from accelmark.run.controller.probe import remembered
from accelmark.run.launchers import create_launcher
from accelmark.run.onhost import abridged
from accelmark.run.preflight.check import preflight_commands
from accelmark.run.record.directory import RunDirectory, default_path
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import EXIT_OK, AccelmarkError, Problem, RequestError, SpecError
from accelmark.spec.model import parse, read_value, read_yaml
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.spec.plugins.launcher import launcher_problems, parse_cluster
from accelmark.spec.runfile import RunSpec
from accelmark.spec.secret import secrets_in, shown

if TYPE_CHECKING:
    from accelmark.plan.plan import PlannedJob
    from accelmark.run.controller.session import RunOutcome

COMMAND_LINE: Final = "command line"


@final
@dataclass(frozen=True, slots=True)
class Overrides:
    """Command-line options that override a request."""

    vendor: str | None = None
    settings: Sequence[str] = ()
    """Each ``dotted.key=value``."""
    synthetic: bool = False
    is_open: bool = False
    strict: bool = False
    fail_fast: bool = False
    timeout_s: float | None = None

    def apply(self, request: RunSpec) -> RunSpec:
        """Return ``request`` with the options that were given."""
        given: dict[str, Any] = {"vendor": self.vendor, "timeout_s": self.timeout_s}
        flags = {"open": self.is_open, "strict": self.strict, "fail_fast": self.fail_fast}
        changed = {name: value for name, value in given.items() if value is not None}
        changed |= {name: True for name, is_set in flags.items() if is_set}
        return parse(RunSpec, request.model_dump() | changed, COMMAND_LINE)

    def layer(self) -> dict[str, Any]:
        """Return the settings as dotted keys.

        Raises:
            SpecError: settings that are not ``key=value``.
        """
        values: dict[str, Any] = {"loader.synthetic": True} if self.synthetic else {}
        problems = []
        for text in self.settings:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                problems.append(Problem(COMMAND_LINE, f"--set {text}", "is not of the form key=value"))
                continue
            values[key.strip()] = read_value(value, f"{COMMAND_LINE}: --set {key}")
        if problems:
            raise SpecError(problems)
        return values


def plan_request(request: RunSpec, overrides: Overrides, *, where: str = COMMAND_LINE, base: Path = Path()) -> Plan:
    """Return the plan of a request on the devices of this machine or of its cluster.

    Args:
        request: the cases to run.
        overrides: the command line's options.
        where: the run file or ``command line``, for error messages.
        base: the directory that a relative path of a cluster file refers to.

    Raises:
        AccelmarkError: the request is wrong; it lists all problems.
    """
    request = overrides.apply(request)
    cluster = _cluster(request.cluster, base)
    plan = build_plan(
        request,
        cluster=cluster,
        detected=detect_devices(request.vendor or cluster.vendor),
        data_dirs=data_dirs,
        created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        where=where,
        command_line=overrides.layer(),
    )
    return plan.model_copy(update={"warnings": (*plan.warnings, *_telemetry_warnings(plan.vendor))})


def detect_devices(vendor: str | None) -> Detected:
    """Return the devices of this machine: those of ``vendor``, else of the accelerator found first, else the CPU."""
    from accelmark.telemetry.detect import default_vendor, detect

    name = vendor or default_vendor()
    found = next((entry for entry in detect([name]) if entry.vendor == name), None)
    if found is None:
        return Detected(vendor=name, hardware=name.upper(), chip=None, num_devices=None)
    chips = set(found.chips)
    return Detected(
        vendor=name,
        hardware=found.hardware or name.upper(),
        chip=chips.pop() if len(chips) == 1 else None,
        num_devices=None if found.fallback else len(found.devices),
        ceilings=remembered(name, found.hardware or name.upper()),
        capabilities=host_capabilities(load_vendor(name)),
    )


def read_run_file(path: Path) -> RunSpec:
    """Read a run file; its data directories are relative to it.

    Raises:
        SpecError: the file is wrong; it lists all problems.
    """
    values = read_yaml(path)
    for case in values.get("cases") or []:
        if isinstance(case, dict) and isinstance(case.get("data"), str):
            case["data"] = str(path.parent / Path(case["data"]).expanduser())
    cluster = values.get("cluster")
    problems = launcher_problems(cluster, str(path), "cluster.") if isinstance(cluster, dict) else []
    return parse(RunSpec, {"name": path.stem} | values, str(path), problems)


def run_name(key: str) -> str:
    """Return a name for the run of a single key: its model, without characters that paths cannot have."""
    name = "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in key.partition(":")[0])
    return name.strip(".-_")[:57] or "case"


def execute(plan: Plan, out: Path | None, *, offline: bool, dry_run: bool, as_json: bool) -> None:
    """Execute ``plan``, or only print it, and end the command with the exit code of the run."""
    path = out or default_path(plan.name, datetime.now(UTC))
    if plan.strict and plan.warnings:
        raise RequestError("\n".join(["not started: --strict is set and there are warnings:", *plan.warnings]))
    if dry_run:
        print_plan(plan, path, as_json=as_json)
        return
    from accelmark.run.controller.session import start
    from accelmark.run.preflight.report import run_preflight

    plan = plan.model_copy(update={"offline": offline})
    if not as_json:
        for warning in plan.warnings:
            typer.secho(f"warning: {warning}", fg="yellow", err=True)
    with host_problems_as_table(as_json=as_json):
        outcome = start(plan, path, DataFetcher(offline), as_json=as_json, preflight=run_preflight)
    finish(outcome, as_json=as_json)


@contextmanager
def host_problems_as_table(*, as_json: bool) -> Iterator[None]:
    """Where hosts are not ready, print one table of all their problems and exit; with ``as_json`` raise the error."""
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


def finish(outcome: RunOutcome, *, as_json: bool) -> None:
    """Write the report page, print the results, and exit with the exit code of the run."""
    page = _write_page(outcome.directory, as_json=as_json)
    if as_json:
        summary = outcome.summary.model_dump(mode="json")
        done = {"event": "summary", "directory": str(outcome.directory), "page": str(page) if page else None}
        typer.echo(json.dumps(done | {"exit_code": outcome.exit_code, "summary": summary}))
    else:
        from accelmark.run.display.summary import print_summary

        print_summary(outcome.summary, outcome.directory, page)
    if outcome.exit_code != EXIT_OK:
        raise typer.Exit(outcome.exit_code)


def print_plan(plan: Plan, path: Path, *, as_json: bool) -> None:
    """Print jobs, commands and settings of ``plan`` without secrets; nothing is written or started."""
    directory = RunDirectory(path.absolute(), plan)
    launcher = create_launcher(plan, directory.path)
    commands: Any = {}
    for job in plan.jobs:
        nodes = node_jobs(directory, job, job_on_hosts(directory, job, go_on=False), launcher)
        commands[job.directory] = {node.host.name: launcher.job_commands(node) for node in nodes}
    first: Any = launcher.allocation_commands()
    checks: Any = preflight_commands(plan, launcher, plan.jobs)
    raw = plan.model_dump(mode="json")
    secrets = set(secrets_in(raw))
    secrets |= {quoted[1:-1] for secret in secrets if (quoted := shlex.quote(secret)) != secret}
    first, checks, commands = (shown(value, secrets) for value in (first, checks, commands))
    if as_json:
        shown_commands = {"first": first, "preflight": checks, "commands": commands}
        typer.echo(json.dumps({"directory": str(path), "plan": shown(raw, secrets), **shown_commands}))
        return
    rounds = "1 round" if len(plan.jobs) == 1 else f"{len(plan.jobs)} rounds"
    typer.secho(f"{plan.name}: {rounds} on {plan.vendor}, run directory {path}", bold=True)
    for warning in plan.warnings:
        typer.secho(f"  warning: {warning}", fg="yellow")
    typer.secho("\npreflight", bold=True)
    for line in first:
        typer.echo(f"  here: {shlex.join(line)}")
    _print_commands(checks)
    printed: set[str] = set()
    for job in plan.jobs:
        typer.secho(f"\n{job.directory}", bold=True)
        _print_commands(commands[job.directory])
        if job.job.key.slug not in printed:
            printed.add(job.job.key.slug)
            _print_settings(job)


def _telemetry_warnings(vendor: str) -> Iterator[str]:
    """Yield problems of a vendor's telemetry declaration: its devices are not sampled then, but ranks run."""
    from accelmark.telemetry.declaration import telemetry_of

    try:
        telemetry_of(load_vendor(vendor), str(find("vendors", vendor).path / "vendor.yaml"))
    except SpecError as error:
        for problem in error.problems:
            yield f"no telemetry of devices: {problem}"


def _cluster(given: ClusterSpec | Path, base: Path) -> ClusterSpec:
    if isinstance(given, ClusterSpec):
        return given
    path = base / given.expanduser()
    return parse_cluster({"name": path.stem} | dict(read_yaml(path)), str(path))


def _write_page(run_dir: Path, *, as_json: bool) -> Path | None:
    """Write the page of a run; a page that cannot be written is a warning, since the results exist."""
    from accelmark.report.run_page import write_page

    try:
        return write_page(run_dir)
    except AccelmarkError as error:
        if not as_json:
            typer.secho(f"warning: cannot write the report page: {error}", fg="yellow", err=True)
        return None


def _print_commands(commands: Mapping[str, list[list[str]]]) -> None:
    for host, lines in commands.items():
        for line in lines:
            typer.echo(f"  {host}: {shlex.join(abridged(line))}")


def _print_settings(job: PlannedJob) -> None:
    for name, place in job.job.data_dirs.items():
        typer.echo(f"  data {name}: {place}" + ("" if place.exists() else "  (will be fetched)"))
    for need in job.requires:
        typer.echo(f"  requires {need.requirement} ({need.needed_by})")
    for file in job.layer_files:
        typer.echo(f"  {'applied' if file.applied else 'not applied'}: {file.file}: {file.reason}")
    width = max(map(len, job.job.provenance), default=0)
    for key, provenance in sorted(job.job.provenance.items()):
        replaced = "".join(f", overrides {_short(value)} ({layer})" for layer, value in reversed(provenance.replaced))
        mark = "  OPEN" if provenance.forced else ""
        typer.echo(f"  {key:<{width}}  {_short(provenance.value):<12}  {provenance.layer}{replaced}{mark}")


def _short(value: Any) -> str:
    return "-" if value is None else json.dumps(value) if isinstance(value, dict | list | tuple | bool) else str(value)
