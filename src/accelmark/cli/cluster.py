"""The verb ``cluster``: measure a cluster as a whole."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from accelmark.cli import options
from accelmark.cli.help import Output
from accelmark.spec.errors import RequestError

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan


def cluster(
    file: Annotated[Path, Argument(metavar="CLUSTER", help="Cluster file.")],
    case: Annotated[str, Option("--case", help="Case that is trained: MODEL or MODEL:FRAMEWORK.")] = "llama_mini",
    hardware: Annotated[str | None, Option(help="Chip of the hosts, as in keys; default: this machine's.")] = None,
    nproc: Annotated[int, Option("--nproc", min=1, help="Devices on each host.")] = 1,
    steps: Annotated[int, Option("--steps", min=4, help="Optimizer steps of each training.")] = 400,
    budget: Annotated[float, Option("--budget", min=0.1, help="Approximate seconds for collectives.")] = 60.0,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> Output | None:
    """Measure all hosts of a cluster file together: scaling, collectives, checkpoints, recovery from a killed rank.

    --dry-run shows two runs: scaling with checkpoints, and recovery. With --json, it prints a line for each.
    """
    from accelmark.cli.machine import detect_devices
    from accelmark.cli.runs import plan_request
    from accelmark.report.cluster_page import headlines, write_cluster_page
    from accelmark.results.cluster import RECOVERY_DIR, SCALING_DIR
    from accelmark.run.launchers import create_launcher
    from accelmark.run.measure import ClusterRequest, measure
    from accelmark.run.record.directory import default_path
    from accelmark.spec.plugins.launcher import read_cluster
    from accelmark.spec.runfile import CaseRequest, RunSpec

    hosts = read_cluster(file)
    here = detect_devices(vendor or hosts.vendor)
    if hardware is None and not here.is_present:
        raise RequestError(
            f"--hardware: this machine has no device of {here.vendor}: name the chip of the hosts, as in keys"
        )
    model, _, framework = case.partition(":")
    counts = sorted({1, len(hosts.hosts)})
    keys = [f"{model}:{framework or 'pytorch'}:{hardware or here.hardware}:{count}:{nproc}" for count in counts]
    every = max(1, steps // 4)
    bounds = {"end.max_steps": steps, "end.at_target": False, "log_every_steps": max(1, min(10, every // 2))}
    given: dict[str, Any] = {**bounds, "checkpoint.every_steps": every, "checkpoint.keep": 2}

    def planned(name: str, *chosen: str) -> Plan:
        cases = tuple(CaseRequest(key=key, settings=given) for key in chosen)
        request = RunSpec(name=name, vendor=vendor or hosts.vendor, open=True, cluster=hosts, cases=cases)
        plan = plan_request(request, settings or (), synthetic=synthetic, where="accelmark cluster")
        return plan.model_copy(update={"offline": offline})

    scaling, recovery = planned("scaling", *keys), planned("recovery", keys[-1])
    directory = out or default_path(f"cluster-{hosts.name}", datetime.now(UTC))
    if dry_run or commands:
        from accelmark.cli.dry_run import print_plan

        for part, name in ((scaling, SCALING_DIR), (recovery, RECOVERY_DIR)):
            print_plan(part, directory / name, as_json=as_json, with_commands=commands)
        return None
    if not as_json:
        for warning in scaling.warnings:
            options.warn(warning)
        if create_launcher(scaling, directory / SCALING_DIR).allocation_commands():
            options.warn("each part requests an allocation, and recovery includes the wait for it: run this inside one")
    kill_step = every + max(1, every // 2)
    request = ClusterRequest(scaling, recovery, kill_step, budget, options.working, as_json=as_json)
    with options.host_problems_printed(as_json=as_json):
        report = measure(request, directory)
    page = write_cluster_page(directory)

    def show() -> None:
        table = options.plain_table("part", "result", "note")
        for headline in headlines(directory, report):
            table.add_row(*headline)
        options.print_table(table)
        typer.echo(f"page: {page}")

    return Output({"page": str(page), "report": report}, show)
