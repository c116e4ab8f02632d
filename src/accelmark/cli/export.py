"""``accelmark export RUN``: export a run to TensorBoard, MLflow or Prometheus."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|BUNDLE", help="Run directory, search directory or bundle.")],
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write event files to this directory.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="Log to this MLflow server or directory.")
    ] = None,
    experiment: Annotated[str, typer.Option("--experiment", help="Name of the MLflow experiment.")] = "accelmark",
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus", help="Print the latest telemetry of a run in progress in Prometheus' text format."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Export a run to TensorBoard, MLflow or Prometheus. Prometheus gets the live telemetry of a run in progress."""
    from accelmark.spec.errors import RequestError

    if tensorboard is None and mlflow is None and not prometheus:
        raise RequestError("choose a format: --tensorboard DIR, --mlflow URI or --prometheus")
    if not run.exists():
        raise RequestError(f"{run}: no such run or bundle")
    if prometheus:
        if not run.is_dir():
            raise RequestError(f"{run}: --prometheus needs the directory of a run in progress")
        from accelmark.telemetry.exposition import expose

        records = sorted(run.glob("*/round*/*/telemetry.jsonl"))
        text = expose([({"run": run.resolve().name}, record) for record in records], now_s=time.time())
        typer.echo(text, nl=False)
        if not text:
            why = "its telemetry has ended" if records else "it has no telemetry files"
            typer.secho(f"warning: {run}: no live telemetry: {why}", fg="yellow", err=True)
    exported: dict[str, list[str]] = {}
    if tensorboard is not None or mlflow is not None:
        from accelmark.results.sources import load_source

        loaded = load_source(run)
        if tensorboard is not None:
            from accelmark.results.export.tracking import to_tensorboard

            exported["tensorboard"] = [str(place) for place in to_tensorboard(loaded, tensorboard)]
        if mlflow is not None:
            from accelmark.results.export.tracking import to_mlflow, tracking_uri_of

            exported["mlflow"] = to_mlflow(loaded, tracking_uri_of(mlflow), experiment)
    if as_json:
        typer.echo(json.dumps(exported))
    else:
        for tool, places in exported.items():
            for place in places:
                typer.echo(f"{tool}: {place}")
