"""``accelmark train KEY``: train one case."""

from __future__ import annotations

from typing import Annotated

import typer

from accelmark.cli import options


def train(
    key: Annotated[str, typer.Argument(help="model[:framework[:hardware[:nnodes[:nproc[:repeat]]]]]")],
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
