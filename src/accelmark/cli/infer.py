"""``accelmark infer KEY``: run inference on the trained model of one case."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from accelmark.cli import options


def infer(
    key: Annotated[str, typer.Argument(help="model[:framework[_version][:hardware]]")],
    compiler: Annotated[
        str | None,
        typer.Option("--compiler", metavar="NAME", help="Inference engine; 'none' stops after the framework's own."),
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, tf32, bf16, fp16 or int8.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Items in one call.")] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario", help="Also run a LoadGen scenario: offline, single_stream, multi_stream, server. Repeatable."
        ),
    ] = None,
    data: options.Data = None,
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
    """Run inference on a case's trained model in an engine. The report has its accuracy with its speed."""
    from accelmark.cli.execute import Overrides, execute, plan_request, run_name
    from accelmark.spec.runfile import CaseRequest, RunSpec

    given: dict[str, Any] = {"precision": precision, "batch_size": batch_size}
    given["scenarios"] = tuple(scenario) if scenario else None
    named = {name: value for name, value in given.items() if value is not None}
    if compiler is not None:
        named["compiler"] = None if compiler == "none" else compiler
    case = CaseRequest(key=key, task="infer", data=data and data.expanduser(), settings=named)
    overrides = Overrides(vendor, settings or (), synthetic, strict=strict, timeout_s=timeout)
    plan = plan_request(RunSpec(name=f"{run_name(key)}-infer", cases=(case,)), overrides)
    execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json)
