"""``accelmark train KEY``: one training case."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def train(
    key: Annotated[str, typer.Argument(help="model[:framework[:hardware[:nnodes[:nproc[:repeat]]]]]")],
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory with data and weights.")] = None,
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
    """Train a case under full measurement, and write a run directory with a page to show."""
    from accelmark.cli.carry_out import carry_out
    from accelmark.cli.request import COMMAND_LINE, Overrides, plan_for
    from accelmark.spec.runfile import CaseRequest, RunSpec

    overrides = Overrides(vendor, settings or (), synthetic, is_open, strict, timeout_s=timeout)
    name = "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in key.partition(":")[0]).strip(".-_")
    request = RunSpec(name=name[:64] or "train", cases=(CaseRequest(key=key, data=data and data.expanduser()),))
    plan = plan_for(request, overrides, where=COMMAND_LINE, beside=Path())
    carry_out(plan, out, offline=offline, dry_run=dry_run, as_json=as_json)
