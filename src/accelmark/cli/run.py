"""``accelmark run FILE``: run the cases of a run file on a machine or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file (YAML).")],
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
