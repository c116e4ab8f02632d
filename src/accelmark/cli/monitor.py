"""``accelmark monitor``: record telemetry in the background, like FlagPerf's monitor scripts."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


class Operation(StrEnum):
    """Operation on the monitor."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    STATUS = "status"


def monitor(
    operation: Annotated[Operation, typer.Argument(help="Operation.")],
    vendor: Annotated[str | None, typer.Option(help="Vendor of the devices; default: the one detected.")] = None,
    log_path: Annotated[Path, typer.Option("--log-path", "-l", help="Directory for the logs.")] = Path("logs"),
    interval: Annotated[float, typer.Option(min=0.05, help="Sampling interval in seconds.")] = 1.0,
    as_json: options.AsJson = False,
) -> None:
    """Record telemetry in the background. Logs have FlagPerf's file names and formats."""
    from accelmark.telemetry import monitor as recorder

    log_path = log_path.absolute()
    if vendor is not None:
        from accelmark.spec.plugins.catalog import find

        find("vendors", vendor, "--vendor")
        if operation in (Operation.START, Operation.RESTART):
            recorder.check_vendor(vendor)  # before the running monitor is stopped
    if operation in (Operation.STOP, Operation.RESTART):
        stopped = recorder.stop(log_path)
        if operation is Operation.STOP and not as_json:
            typer.echo("stopped" if stopped else f"no monitor is running for {log_path}")
    if operation in (Operation.START, Operation.RESTART):
        if vendor is None:
            from accelmark.telemetry.detect import default_vendor

            vendor = default_vendor()
        recorder.start(vendor, log_path, interval)
    now = recorder.status(log_path)
    if as_json:
        entry = {"running": now.running, "pid": now.pid, "vendor": now.vendor, "samples": now.num_samples}
        typer.echo(json.dumps(entry | {"log_path": str(now.log_path)}))
    elif operation is not Operation.STOP:
        running = f"running as process {now.pid} ({now.vendor}, {now.num_samples} samples so far)"
        typer.echo(f"{running if now.running else 'not running'}, logs in {now.log_path}")
