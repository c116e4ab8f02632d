"""``accelmark export RUN``: a run in the formats of TensorBoard, MLflow and Prometheus."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|BUNDLE", help="Directory of a run or search, or a bundle.")],
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write event files below this directory.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="Log to this MLflow server or local directory.")
    ] = None,
    experiment: Annotated[str, typer.Option("--experiment", help="MLflow's experiment.")] = "accelmark",
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print live telemetry of a run in progress as Prometheus text.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Hand a run over to other tools: figures, curves, settings, artefacts, live telemetry."""
    from accelmark.spec.errors import RequestError

    if tensorboard is None and mlflow is None and not prometheus:
        raise RequestError("say where to: --tensorboard DIR, --mlflow URI or --prometheus")
    if not run.exists():
        raise RequestError(f"{run}: there is no such run or bundle")
    if prometheus:
        if not run.is_dir():
            raise RequestError(f"{run}: live telemetry is read from the directory of a run in progress")
        from accelmark.telemetry.exposition import expose

        records = sorted(run.glob("*/round*/*/telemetry.jsonl"))
        text = expose([({"run": run.resolve().name}, record) for record in records], now_s=time.time())
        typer.echo(text, nl=False)
        if not text:
            why = "its records have ended or are old" if records else "it holds no record"
            typer.secho(f"warning: {run}: no live telemetry: {why}", fg="yellow", err=True)
    told: dict[str, list[str]] = {}
    if tensorboard is not None or mlflow is not None:
        from accelmark.results.store.sources import load_source

        loaded = load_source(run)
        if tensorboard is not None:
            from accelmark.results.export.tracking import to_tensorboard

            told["tensorboard"] = [str(place) for place in to_tensorboard(loaded, tensorboard)]
        if mlflow is not None:
            from accelmark.results.export.tracking import to_mlflow, tracking_place

            told["mlflow"] = to_mlflow(loaded, tracking_place(mlflow), experiment)
    if as_json:
        typer.echo(json.dumps(told))
    else:
        for tool, places in told.items():
            for place in places:
                typer.echo(f"{tool}: {place}")
