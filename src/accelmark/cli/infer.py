"""``accelmark infer KEY``: one inference case."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from accelmark.cli import options


def infer(
    key: Annotated[str, typer.Argument(help="model[:framework[_version][:hardware]]")],
    compiler: Annotated[
        str | None, typer.Option("--compiler", metavar="NAME", help="Engine; 'none' ends after validation.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, tf32, bf16, fp16 or int8.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Items in one call.")] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", help="LoadGen scenario besides: offline, single_stream, multi_stream or server."),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory with data and weights.")] = None,
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
    """Take a case's trained model through the seven steps of inference, with the accuracy beside every speed."""
    from accelmark.cli.carry_out import carry_out
    from accelmark.cli.request import COMMAND_LINE, Overrides, plan_for
    from accelmark.spec.runfile import CaseRequest, RunSpec

    given: dict[str, Any] = {"precision": precision, "batch_size": batch_size}
    given["scenarios"] = tuple(scenario) if scenario else None
    named = {name: value for name, value in given.items() if value is not None}
    if compiler is not None:
        named["compiler"] = None if compiler == "none" else compiler
    overrides = Overrides(vendor, settings or (), synthetic, strict=strict, timeout_s=timeout)
    name = "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in key.partition(":")[0]).strip(".-_")
    case = CaseRequest(key=key, task="infer", data=data and data.expanduser(), settings=named)
    request = RunSpec(name=f"{name[:57] or 'case'}-infer", cases=(case,))
    carry_out(plan_for(request, overrides, where=COMMAND_LINE, beside=Path()), out, offline=offline,
              dry_run=dry_run, as_json=as_json)  # fmt: skip
