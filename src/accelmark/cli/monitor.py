"""``accelmark monitor``: the recorder by itself, as FlagPerf's monitor scripts are used."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Operation(StrEnum):
    """What to do."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    STATUS = "status"


def monitor(
    operation: Annotated[Operation, typer.Argument(help="What to do.")],
    vendor: Annotated[str | None, typer.Option(help="Whose devices; by default those that are here.")] = None,
    log_path: Annotated[Path, typer.Option("--log-path", "-l", help="Where the logs go.")] = Path("logs"),
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between samples.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Watch host and devices in the background; logs have FlagPerf's names and line formats."""
    from accelmark.telemetry import monitor as recorder

    log_path = log_path.absolute()
    if vendor is not None:
        from accelmark.spec.catalog import find

        find("vendors", vendor, "--vendor")
        if operation in (Operation.START, Operation.RESTART):
            recorder.check_vendor(vendor)  # before anything is stopped
    if operation in (Operation.STOP, Operation.RESTART):
        stopped = recorder.stop(log_path)
        if operation is Operation.STOP and not as_json:
            typer.echo("stopped" if stopped else f"no monitor writes to {log_path}")
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
