"""The verb ``reproduce``: compare a run with a published figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelmark.cli import completion, options
from accelmark.cli.options import Output, argument, option
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.number_format import quantity

if TYPE_CHECKING:
    from accelmark.results.claims import Claim
    from accelmark.results.store.loaded_run import LoadedRun

_ROUNDS = 3
"""Rounds of a reproduction by default, since one has no interval."""


def reproduce(
    claim: Annotated[
        str | None,
        argument("CLAIM", "Name of a claim or a YAML file; without one, claims are listed.", completion.claims),
    ] = None,
    check: Annotated[
        Path | None, option("RUN|BUNDLE|RESULT", "Compare this run, bundle or result.json; start nothing.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = _ROUNDS,
    data: options.Data = None, vendor: options.Vendor = None, settings: options.Settings = None,
    synthetic: options.Synthetic = False, out: options.Out = None, offline: options.Offline = False,
    output: Annotated[
        Path | None, option("FILE", "Page of the comparison; default: in the run.", "--output", "-o")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> Output | None:  # fmt: skip
    """Reproduce a published figure: run what comes closest, and report REPRODUCED, SHORT, BETTER or NOT COMPARABLE."""
    from accelmark.results.claims import claim_files, load_claim

    if claim is None:
        listed = {name: load_claim(name)[1] for name in claim_files()}
        rows = [(name, quantity(of.value, of.unit), f"{of.num_devices} x {of.hardware}") for name, of in listed.items()]
        return Output(listed, lambda: options.print_table(("claim", "figure", "on"), rows))
    name, content = load_claim(claim)
    if check is not None:
        return _compared(name, content, _run_at(check), output)
    from accelmark.cli.machine import detect_devices
    from accelmark.cli.runs import execute, plan_request
    from accelmark.results.claims import planned_differences
    from accelmark.spec.runfile import CaseRequest, RunSpec

    here = detect_devices(vendor)
    is_here = here.hardware == content.hardware
    if not is_here and not dry_run:
        what = f"this machine has {here.hardware}, the claim is about {content.hardware}: a run would be NOT COMPARABLE"
        raise RequestError(f"{what}; compare a run of such a machine with --check")
    nproc = min(content.nproc, here.num_devices or content.nproc) if is_here else content.nproc
    stated = {name: value for name, value in content.settings.items() if value is not None}
    if content.task == "train" and content.precision is not None:
        stated["precision"] = content.precision
    key = f"{content.case}:{content.framework}:{content.hardware}:1:{nproc}:{rounds}"
    case = CaseRequest(key=key, task=content.task, data=data, settings=stated | content.run)
    request = RunSpec(name=f"reproduce-{content.case}", vendor=vendor, open=bool(content.run), cases=(case,))
    synthetic = synthetic or (content.data == "synthetic" and content.task != "serve")
    plan = plan_request(request, settings or (), synthetic=synthetic, where="the claim", allow_missing_data=dry_run)
    if not as_json:
        job = plan.jobs[0].job
        values = {name: setting.value for name, setting in job.provenance.items()}
        precision = str(values.get("precision", content.precision))
        made_up = bool(values.get("loader.synthetic") or values.get("synthetic"))
        differences = list(planned_differences(content, values, precision, job.key.world_size, synthetic=made_up))
        typer.secho(f"{name}: {content.title}: {quantity(content.value, content.unit)}", bold=True)
        typer.echo(f"source: {content.source.document}")
        typer.echo("will differ:" if differences else "will differ: nothing that the source states")
        for difference in differences:
            options.echo_wrapped(f"  {difference.text}")
        for text in content.not_stated:
            options.echo_wrapped(f"  not stated: {text}")
    directory = execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json, is_judged=True)
    if directory is None:
        return None
    return _compared(name, content, _run_at(directory), output or directory.with_suffix(".reproduction.html"))


def _run_at(path: Path) -> LoadedRun:
    from accelmark.results.claims import load_result
    from accelmark.results.sources import load_source
    from accelmark.results.store.bundle import is_bundle

    path = options.own_run(path)
    return load_result(path) if path.is_file() and not is_bundle(path) else load_source(path, curves=False)


def _compared(name: str, claim: Claim, run: LoadedRun, output: Path | None) -> Output:
    """Compare a run, write page and JSON file where asked for, and return what is printed."""
    from accelmark.report.comparison import figures_text, render_reproduction
    from accelmark.results.claims import reproduce as compare
    from accelmark.results.store.files import write_atomic

    reproduction = compare(name, claim, run)
    if output is not None:
        write_atomic(output, render_reproduction(reproduction))
        write_atomic(output.with_suffix(".json"), reproduction.model_dump_json(indent=1) + "\n")

    def show() -> None:
        color = {"REPRODUCED": "green", "BETTER": "green", "SHORT": "red"}.get(reproduction.verdict, "yellow")
        typer.secho(f"{reproduction.text}: {reproduction.claim} by {reproduction.run}", fg=color, bold=True)
        for reason in reproduction.reasons:
            options.echo_wrapped(f"  {reason}", fg="yellow")
        for title, text in figures_text(reproduction):
            options.echo_wrapped(f"  {title}: {text}")
        options.echo_wrapped(f"  Source: {reproduction.source.document}")
        same = "nothing differs that the source states"
        typer.echo("what differs, by expected cost:" if reproduction.differences else same)
        for difference in reproduction.differences:
            options.echo_wrapped(f"  {difference.text}")
        for text in reproduction.not_stated:
            options.echo_wrapped(f"  not stated by the source: {text}")
        if output is not None:
            typer.echo(str(output))

    return Output(reproduction, show, EXIT_OK if reproduction.verdict in ("REPRODUCED", "BETTER") else EXIT_FAILED)
