"""``accelmark evaluate RUN``: evaluate the final weights of a run again, without vendor code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from accelmark.cli import options


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    replay: Annotated[
        int, typer.Option("--replay", min=0, metavar="NUM_STEPS", help="Also replay optimizer steps from a checkpoint.")
    ] = 0,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Evaluate the final weights of a run again. Uses the case's own code, and compares with the reported metrics."""
    from accelmark.audit.outcome import reevaluation_findings
    from accelmark.results.read.reevaluation import read_reevaluation
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.controller.evaluate import evaluate_run
    from accelmark.spec.errors import EXIT_FAILED

    done = evaluate_run(run, DataFetcher(offline), replay, lambda text: None if as_json else typer.echo(text))
    rounds = []
    for one in done:
        found = read_reevaluation(one.round_dir)
        number = int(one.round_dir.name.removeprefix("round"))
        findings = list(reevaluation_findings(found, number)) if found is not None else []
        name = f"{one.round_dir.parent.name}/{one.round_dir.name}"
        rounds.append((name, one, found, findings))
    if as_json:
        values = [
            {
                "round": name,
                "state": one.state,
                "reason": one.reason,
                "metrics": found.metrics if found is not None else None,
                "num_replayed_steps": one.num_steps,
                "findings": [finding.model_dump(mode="json") for finding in findings],
            }
            for name, one, found, findings in rounds
        ]
        typer.echo(json.dumps(values))
    else:
        for name, one, found, findings in rounds:
            steps = f", {one.num_steps} steps replayed" if one.num_steps else ""
            if replay and not one.num_steps:
                steps = f", nothing replayed: no checkpoint is at least {replay} steps older than the last"
            typer.echo(f"{name}: {one.state}{f': {one.reason}' if one.reason else steps}")
            for finding in findings:
                typer.secho(f"  {finding}", fg="red" if finding.severity == "error" else "yellow")
            if one.state == "succeeded" and found is not None and not findings:
                metrics = ", ".join(f"{metric} {value:.6g}" for metric, value in (found.metrics or {}).items() if value)
                typer.secho(f"  reproduced: {metrics}", fg="green")
    if any(one.state != "succeeded" or findings for _, one, _, findings in rounds):
        raise typer.Exit(EXIT_FAILED)
